"""How much is tried, and from where on something is worth trying: the tuning constants of the search.

Each has its meaning, its unit and the decision (docs/decisions) that chose it, where there is one. Effort is counted in
rounds, launches and blocks, never in seconds, so that plans do not depend on the machine. The file lies beside the
packages of `mbc.optimize`, not in `search`: the lowest of them read it, and none of them imports `search`.

Not here: what models the machine (`schedule.contention`, `search.overhead`) and how numbers are represented.
"""

from __future__ import annotations

# --- candidates ---

# Micro-batches of one operation, at most: no division into more calls is worth its launches.
MAX_MICRO_BATCHES = 1 << 14
# Time of the fastest single call over that of a division which is worth it (008): measurements differ by as much.
DIVISION_GAIN = 1.01

# Share of the operations of a step that were measured for any rows, from which on a number of rows counts as measured
# (043).
MEASURED_SHARE = 0.75

# Time of a step over that of the best serial schedule, whatever workspace it takes, from which on micro-batches are
# measured (063).
MEASURING_GAIN = 1.01

# What was not measured is taken to need this share of its estimate where it is decided what to measure next (067): one
# estimate in ten is lower still.
OPTIMISM = 0.7
# The same of times that are scaled from a similar GPU (069), or from batches of at most so many times the rows (070).
SCALED_OPTIMISM = 0.8
NEAR_TIMES = 4
# Share of a step, planned with that optimism, that is not measured: with less no more is measured (067).
UNDECIDED_SHARE = 0.01

# --- selection ---

# CP-SAT's deterministic time to divide workspace, in seconds of a nominal machine: ResNet-50 needs a fraction of one
# (005).
KNAPSACK_DETERMINISTIC_TIME = 20.0
# Bisections of the range of prices of workspace, and its upper end in us a byte: no kernel gains so much (005).
PRICE_BISECTIONS = 24
MAX_US_PER_BYTE = 1e-2

# --- fusion ---

# How many times shorter one launch for many updates or casts has to be than these where only one of the two times was
# measured: estimates of what is bound by memory and launches are nowhere that far off (062).
CLEARLY_FASTER = 2.0

# --- schedule ---

# Numbers of launches into which one multi-tensor update is split for the concurrent stream (024).
UPDATE_SPLITS = (2, 4, 8)
# Time in us of a launch from which on it is split (024).
UPDATE_SPLIT_MIN_US = 10.0
# Within a budget: the share of the available bytes that the operands of one part keep live until it runs, and parts of
# a launch at most (037).
UPDATE_HELD_SHARE, UPDATE_MAX_SPLITS = 1 / 200, 16
# Buckets of about the same bytes that gradients are summed in, and how often the last of them is halved.
BUCKET_COUNTS, LAST_BUCKET_CUTS = (1, 2, 3, 4, 6, 8), (0, 1, 2, 3)
# By how many us a copy is over before it is needed, to wait for a later kernel: predictions are off by some us (027).
WAIT_SLACK_US = 50.0

# --- placement ---

# Arena over its lower bound (peak live bytes) from which on no more search is worth it.
PLACEMENT_GOOD_ENOUGH = 1.001
# Blocks times orders that greedy placement looks at; larger programs try fewer orders.
GREEDY_PLACEMENT_WORK = 40_000
# Blocks smaller than the lower bound over so many fill the gaps that others leave; the latter are annealed (013).
SMALL_BLOCK_DIVISORS = (2000, 20_000)
# Skyline placement: rounds times blocks, most rounds (013), and rounds where it is only asked whether the blocks fit
# (022).
SKYLINE_WORK = 60_000
SKYLINE_MAX_ROUNDS = 200
SKYLINE_QUICK_ROUNDS = 8
# Factors by which blocks that end too high, and any, come earlier in the next round, at most (013).
SKYLINE_HIGH_PROMOTION, SKYLINE_ANY_PROMOTION = 2.5, 1.02
# Annealing (004): most rounds, rounds times blocks squared, fewest rounds that are worth the trouble, and the share of
# the lower bound by which a round may be worse at the start.
ANNEAL_MAX_ROUNDS = 8000
ANNEAL_WORK = 60_000_000
ANNEAL_MIN_ROUNDS = 2000
ANNEAL_START_TOLERANCE = 0.002
# Skyline search (064): blocks tried at most, also times all blocks squared; limits asked for, each with half of what is
# left, and the part for the lower bound where the budget is above it; blocks tried in the first restart, and how many
# times more in each one after it.
SKYLINE_SEARCH_NODES = 1_500_000
SKYLINE_SEARCH_WORK = 160_000_000_000
SKYLINE_SEARCH_LIMITS = 6
SKYLINE_SEARCH_BOUND_DIVISOR = 8
SKYLINE_SEARCH_RESTART_NODES = 300
SKYLINE_SEARCH_RESTART_GROWTH = 1.02
# Which blocks it tries first: ranks are lives to one of these powers in turn, times a random factor of up to so much,
# times a factor where the block is flush with the lower wall of its gap; the area that is wasted counts so many times.
SKYLINE_SEARCH_LIFE_EXPONENTS = (1.0, 0.0, 0.5)
SKYLINE_SEARCH_PROMOTION = 3.0
SKYLINE_SEARCH_FLUSH_PROMOTION = 4.0
SKYLINE_SEARCH_WASTE_AVERSION = 100.0

# --- remat: greedy ---

# Values of less than this share of the available bytes are always kept.
ALWAYS_KEPT_SHARE = 1 / 20_000
# Values of at least this share of the available bytes are converted back from the layout that is needed first, where
# both are needed once more (072).
CONVERTED_BACK_SHARE = 1 / 100
# Rounds of greedy choice, each measured in the rewritten program (009), and how many in a row may find no lower peak.
GREEDY_ROUNDS = 40
GREEDY_PATIENCE = 10
# Recomputation that takes longer than so many steps is given up.
MAX_RECOMPUTED_STEPS = 1.0
# Some recomputations are dropped again at the end: the search gives up only where they cost so many times what the best
# step so far, or other segments, leave for them (018).
RECOMPUTE_OVERSHOOT = 1.5
# Lengths of segments that are tried, in shares of the available bytes; rounds of greedy choice where one does not fit;
# and up to how many times its length a segment may grow to end where fewer bytes are live (018).
SEGMENT_SHARES = (1.0, 0.7, 0.5, 0.4, 0.3)
SEGMENT_ROUNDS = 3
SEGMENT_STRETCH = 1.5
# Regions times trials of dropping a recomputation, each of which looks at the whole program.
KEEP_WORK = 60_000_000
# Values of one recomputation chain, times regions, and how long a chain may be in any program: in a deep network some
# intermediate values are kept, from which the others are recomputed.
CHAIN_WORK = 1_500_000
CHAIN_MIN_VALUES = 60
# All sets of so many gaps are compared; of those that are faster so many are measured (009).
EXHAUSTIVE_GAPS = 12
EXHAUSTIVE_MEASURED = 1000

# --- remat: local search ---

# Rounds at most (014; twice as many find another 0.1 %, 038).
LOCAL_SEARCH_ROUNDS = 200
# Decisions that a round undoes (038).
NEIGHBOURHOOD_SIZES = (2, 4, 8, 16, 32)
# Largest relative perturbation of a price in a round (014; a quarter and nine tenths were worse, 038).
PRICE_NOISE = 0.5
# Share of the rounds that offload other values than before (014).
SWAP_OFFLOAD_SHARE = 0.3
# Improvements by the ledger after which the program is measured (014), and rounds of freeing bytes where the ledger
# proves wrong.
MEASURE_AFTER = 8
SETTLE_ROUNDS = 3
# The least gain that counts as an improvement, in us.
IMPROVEMENT_US = 1e-3

# --- remat: offloading and fused rematerialization ---

# Shorter copies, in us, are not worth the waits between them and kernels (020).
MIN_COPY_US = 100.0
# Share of the available bytes that coalesced copies leave to workspaces, and to fragmentation (027).
COALESCE_SPARE_SHARE = 0.1
# Regions after a reduction within which a value that it recomputed must be read first: until then it takes memory
# (021).
FUSED_REMAT_NEAR_RUNS = 6

# --- bounds ---

# Operations at which the time within a budget is bounded, spread evenly over the step; the best bound counts (009).
BUDGET_BOUND_POSITIONS = 64
# Operations that the I/O bound looks back to recompute a value; what is further away is read. 30 find the optimum of a
# ResNet, and all but 0.3 % of a DenseNet's; a longer reach makes the linear program of a network of 2,500 layers slow
# to solve.
IO_BOUND_REACH = 50

# --- search: fitting a budget ---

# Rounds of reducing workspaces in a step that keeps everything.
KEEP_ALL_ROUNDS = 8
# Time over that of the fastest step without a limit: within the first factor, nothing else is tried; the second is a
# relative difference below the precision of predictions.
FIT_GOOD_ENOUGH = 1.02
FIT_NEGLIGIBLE = 1e-3
# Shares of the available bytes: optimizer states of less than the first stay on the device if a step fits with them;
# where they are more than the second, offloading them is tried first (037).
STATES_OFFLOAD_SHARE = 0.1
STATES_CROWDING_SHARE = 0.4
# How long states are on the device around their update, in times of their copy; and what is offloaded first: (factor of
# the bytes lacking, added to what one update needs, and the lead).
STATES_LEAD = 2.0
STATES_TRIALS = ((1.0, 0.5), (1.5, 0.0))
# Depth-first micro-batches (009, 018, 025): values above these shares of the available bytes are divided; where
# something fits undivided, only if the largest value takes at least the second share.
DIVIDED_VALUE_SHARES = (1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64)
DIVIDED_MIN_SHARE = 0.2
# Share of the available bytes that a micro-batch takes at most (several are live together); operations times divisions
# of the same values that are compared; and the time in passes over a value (read and write) above which recomputing it
# is too slow: it may be kept as a whole for the backward pass.
MICRO_BATCH_SHARES = (1 / 8, 1 / 16)
DIVISIONS_WORK = 1000
KEPT_WHOLE_PASSES = 6
# Repeated fits where many launches leave fewer available bytes, and the margin on that difference (022).
MAX_REFITS, REFIT_MARGIN = 3, 1.25
# Shares of the available bytes that are tried as well where a step takes so many times what it does without a limit,
# and has at most so many launches.
NEARBY_BUDGETS = (0.995, 0.99)
NEARBY_BUDGETS_SLOWDOWN, NEARBY_BUDGETS_MAX_LAUNCHES = 1.25, 2000
# Ratio of the fastest steps without and with ReLU bit masks from which on masks are tried within a budget (030).
RELU_MASKS_GAIN = 1.01

# --- search: variants ---

# Limits of workspace that are tried, in shares of the available bytes; the rest is for kept values (018).
WORKSPACE_SHARES = (1.0, 0.6, 0.42, 0.3, 1 / 5, 1 / 8, 1 / 16, 1 / 64, 0.0)
# Shares of the excess that are offloaded at most, tried after no limit on it.
OFFLOAD_SHARES = (0.5, 0.0)
# Peak live bytes over the available bytes: above the first ratio, similar variants are given up where something fits;
# above the second, local search does not reach a fit (018).
GIVE_UP_PEAK = 1.2
REACHABLE_PEAK = 2.0
# No more is searched thoroughly, in similar variants neither, where that left more than the first share of the lacking
# bytes and more than the second of the available ones.
HOPELESS_LACK, NEAR_FIT_SHARE = 0.5, 0.02
# Work of one fit, in launches of rewritten programs, after which nothing more is tried where nothing fits yet: so much,
# or so much for each operation of the step if that is more. To price a gap counts as PRICE_WORK of them. The most that
# a step needed that fits was 3.7 million (ResNet-50).
NOT_FOUND_WORK = 4_000_000
NOT_FOUND_WORK_OF_OPERATION = 1_000
PRICE_WORK = 4
# Arena of the smallest step found over the available bytes from which on no other kind of step (without fusion, with
# ReLU bit masks) is tried: their smallest arenas differed by 1.4 at most.
HOPELESS_ARENA = 2.0
# Launches times variants that are compared; a longer program is fitted in fewer of them.
VARIANTS_WORK = 15_000
# Launches times rounds of local search: for every variant, and for one that is to be placed (014).
QUICK_SEARCH_WORK = 8_000
THOROUGH_SEARCH_WORK = 80_000
# Variants that are searched thoroughly: so many, within such a factor of the fastest (027), if so many rounds are
# possible.
MAX_THOROUGH = 3
THOROUGH_WITHIN = 1.05
THOROUGH_MIN_ROUNDS = 10
# Repetitions of those rounds at most, while the last ones made the step shorter by at least this share of it (025).
MAX_REPEATS, REPEAT_GAIN = 4, 1e-3
# Fragmentation: what placement leaves unused between buffers, in shares of the available bytes. Above the first there
# is no other try; the next try spares at least the second, and so many times the bytes by which the last one did not
# fit (027).
MAX_SPARED_SHARE = 0.15
MIN_SPARED_SHARE = 0.004
SPARED_FACTOR = 1.5
# Share of its time by which a variant that is tried again may be slower, since its placement is likelier to fit (018).
RETRY_BONUS = 0.01
# Variants that are placed, at most and at least; how many after the first that fits (022); and the sum of their
# launches.
MAX_PLACEMENTS = 8
MIN_PLACEMENTS = 5
PLACEMENTS_AFTER_FIT = 2
PLACEMENTS_WORK = 15_000

# --- search: after placement ---

# Reclaimed workspace (022): placements of workspaces together with values, launches times these, and the share of the
# kernels' time that is not worth another try.
RECLAIM_MAX_TRIALS, RECLAIM_WORK = 10, 20_000
RECLAIM_NEGLIGIBLE = 1e-3
# Concurrent stream (019): least time in us of the launches that move to it, in one attempt after another (fewer
# launches need fewer waits); and us above which a launch fills every multiprocessor, however far it is from the
# roofline.
CONCURRENT_MIN_US = (4.0, 10.0, 25.0)
CONCURRENT_MAX_US = 60.0
# Time and arena over those of the serial schedule, at most (019): operands of concurrent launches are live for longer.
CONCURRENT_MAX_TIME = 0.99
CONCURRENT_MAX_ARENA = 1.1

# --- search: what is measured first ---

# Weights relative to a training step's launches: inference is planned once, and most conversions are never chosen.
INFERENCE_WEIGHT = 0.1
CONVERSION_WEIGHT = 0.05
