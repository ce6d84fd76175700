"""JAX as a contender: forward, backward and update in one jitted function whose state is donated.

Imported only where JAX is installed. bf16 and fp16: operands of convolutions and products are cast, weights stay fp32,
fp16 scales the loss as PyTorch's gradient scaler does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mbc.bench.contender_messages import LOSS_SCALE, Contender, Job, Result
from mbc.bench.jax_functions import FUNCTIONS, PRODUCTS, batch_norm, jax, jnp
from mbc.bench.recipe import dropout_masks, recipe
from mbc.bench.timing import time_steps
from mbc.ir.control import GROWTH_INTERVAL, SCALE_BACKOFF, SCALE_GROWTH
from mbc.ir.graph import Network, Optimizer, Role
from mbc.ir.parameter_groups import is_trained, settings_of
from mbc.ir.types import Precision
from mbc.ops.normalization import BatchNorm
from mbc.ops.random import Dropout
from mbc.ops.update import NORM_EPSILON
from mbc.runtime.initial_states import initial

Tensor = Any
States = Mapping[str, Tensor]

_PRODUCTS_IN = {Precision.FP32: "highest", Precision.TF32: "tensorfloat32", Precision.FP64: "highest"}


def run(job: Job, _: Contender) -> Result:
    """Train and time the network of a job in JAX."""
    lowered = job.lowered()
    network, precision = lowered.network, lowered.precision
    jax.config.update("jax_enable_x64", precision is Precision.FP64)
    jax.config.update("jax_platforms", "cuda" if job.device == "cuda" else "cpu")
    jax.config.update("jax_default_matmul_precision", _PRODUCTS_IN.get(precision))
    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        return Result(problem=f"this JAX cannot be used: {error}")
    batches = [job.inputs(number) for number in range(job.losses)]
    began = time.perf_counter()
    wide = jnp.float64 if precision is Precision.FP64 else jnp.float32
    half = {Precision.BF16: jnp.bfloat16, Precision.FP16: jnp.float16}.get(precision)
    states = {
        s.value: jnp.asarray(initial(s.value, network.values[s.value].type, s.initializer, job.seed), wide)
        for s in network.states
    }
    step = jax.jit(training_step(network, lowered.optimizer, job.learning_rate, half), donate_argnums=0)
    state = first_state(network, lowered.optimizer, states, precision is Precision.FP16)
    placed = [[_placed(batch[name], wide) for name in network.inputs] for batch in batches]
    losses: list[float] = []
    first_step_s = 0.0
    for number, batch in enumerate(placed):
        masks = {name: jnp.asarray(mask) for name, mask in dropout_masks(network, job.seed, number + 1).items()}
        state, loss = step(state, batch, masks or None)
        losses.append(float(loss))
        first_step_s = first_step_s or time.perf_counter() - began
    del placed[1:]
    last: list[Any] = [state, None]

    def one() -> None:
        last[0], last[1] = step(last[0], placed[0], None)

    timing = time_steps(one, lambda: jax.block_until_ready(last[1]), job.blocks, job.block_s)
    memory: dict[str, int] = device.memory_stats() or {}
    return Result(
        tuple(losses),
        timing.step_ms,
        timing.spread_ms,
        timing.steps,
        first_step_s,
        memory.get("peak_bytes_in_use", 0),
        0,
        f"JAX {jax.__version__}",
        "compared with mbc's dropout" if dropout_masks(network, job.seed, 1) else "",
    )


def _placed(array: Any, wide: Any) -> Tensor:
    return jnp.asarray(array, jnp.int32 if np.issubdtype(array.dtype, np.integer) else wide)


def first_state(network: Network, rule: Optimizer, states: States, scaled: bool) -> dict[str, Any]:
    """Return all arrays that a step receives and returns, as they are before the first step.

    These are parameters and statistics, the optimizer's states, moving averages, counters, the random key and the loss
    scale.
    """
    trained = {name: array for name, array in states.items() if is_trained(rule, network.values[name])}
    memories = 2 if rule.kind != "sgd" else 1 if rule.momentum else 0
    return {
        "trained": trained,
        "untrained": {name: array for name, array in states.items() if name not in trained},
        "memories": tuple({name: jnp.zeros_like(a) for name, a in trained.items()} for _ in range(memories)),
        "averages": dict(states) if rule.ema else {},
        "updates": jnp.zeros((), jnp.int32),
        "key": jax.random.key(0),
        "scale": jnp.asarray(LOSS_SCALE if scaled else 1.0, jnp.float32),
        "since_growth": jnp.zeros((), jnp.int32),
    }


def training_step(network: Network, rule: Optimizer, learning_rate: float, half: Any) -> Callable[..., Any]:
    """Return a function of state, inputs and dropout masks (None: drawn) that returns the next state and the loss."""
    if rule.kind in ("lars", "lamb"):
        raise ValueError(f"there is no optimizer {rule.kind} for JAX here")
    forward = _forward(network, half)
    scaled = half == jnp.float16
    rules = _rules(network, rule, learning_rate)

    def step(state: dict[str, Any], inputs: Sequence[Tensor], masks: Mapping[str, Tensor] | None) -> Any:
        key, drawn = jax.random.split(state["key"])

        def loss_of(trained: States) -> Any:
            loss, statistics = forward({**trained, **state["untrained"]}, inputs, masks, drawn)
            return loss * state["scale"] if scaled else loss, (loss, statistics)

        gradients, (loss, statistics) = jax.grad(loss_of, has_aux=True)(state["trained"])
        following = {**state, "key": key}
        good = jnp.asarray(True)
        if scaled:
            gradients = {name: g / state["scale"] for name, g in gradients.items()}
            good = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in gradients.values()]))
            grown = good & (state["since_growth"] + 1 >= GROWTH_INTERVAL)
            factor = jnp.where(good, jnp.where(grown, SCALE_GROWTH, 1.0), SCALE_BACKOFF)
            following["scale"] = state["scale"] * factor
            following["since_growth"] = jnp.where(good & ~grown, state["since_growth"] + 1, 0)
        updated = _updated(rules, state, _clipped(rule, gradients))

        def chosen(new: Tensor, old: Tensor) -> Tensor:
            return jnp.where(good, new, old)

        if scaled:
            updated = jax.tree.map(chosen, updated, {name: state[name] for name in updated})
        following |= {**updated, "untrained": {**state["untrained"], **statistics}}
        weights = {**following["trained"], **following["untrained"]}
        following["averages"] = {
            name: a + (1 - rule.ema) * (weights[name] - a) for name, a in state["averages"].items()
        }
        return following, loss

    return step


def _forward(network: Network, half: Any) -> Callable[..., tuple[Tensor, States]]:
    calls = recipe(network, ())

    def forward(
        states: States, inputs: Sequence[Tensor], masks: Mapping[str, Tensor] | None, key: Tensor
    ) -> tuple[Tensor, States]:
        values: dict[str, Tensor] = {**states, **dict(zip(network.inputs, inputs, strict=True))}
        statistics: dict[str, Tensor] = {}
        for call in calls:
            operation, a = call.operation, call.operation.attributes
            operands = [values[name] for name in call.operands]
            if isinstance(a, BatchNorm):
                affine, running = a.split(operands[1:])
                y, *after = batch_norm(a, operands[0], affine, running)
                statistics.update(zip(a.split(call.operands[1:])[1], after, strict=True))
            elif isinstance(a, Dropout):
                key, here = jax.random.split(key)
                y = _dropout(a, operands[0], None if masks is None else masks[operation.name], here)
            else:
                if half is not None and operation.kind in PRODUCTS:
                    operands = [x.astype(half) for x in operands]
                y = FUNCTIONS[operation.kind](a, *operands)
            values.update(call.named(y))
        loss = sum(weight * values[name].reshape(()) for name, weight in network.losses)
        return loss, statistics

    return forward


def _dropout(a: Any, x: Tensor, mask: Tensor | None, key: Tensor) -> Tensor:
    if a.probability == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - a.probability, a.drawn(x.shape)) if mask is None else mask
    return jnp.where(keep, x / (1 - a.probability), 0).astype(x.dtype)


def _clipped(rule: Optimizer, gradients: States) -> States:
    if rule.clip_norm:
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients.values()))
        factor = jnp.minimum(1.0, rule.clip_norm / (norm + NORM_EPSILON))
        gradients = {name: g * factor for name, g in gradients.items()}
    if rule.clip_value:
        gradients = {name: jnp.clip(g, -rule.clip_value, rule.clip_value) for name, g in gradients.items()}
    return gradients


def _rules(network: Network, rule: Optimizer, learning_rate: float) -> dict[str, tuple[Optimizer, float]]:
    """Return the rule of each parameter, with its own weight decay, and its learning rate."""
    parameters = [value for value in network.values.values() if value.role is Role.PARAMETER]
    own = {value.name: settings_of(rule, value) for value in parameters}
    return {name: (replace(rule, weight_decay=s.weight_decay), s.rate * learning_rate) for name, s in own.items()}


def _updated(rules: Mapping[str, tuple[Optimizer, float]], state: dict[str, Any], gradients: States) -> dict[str, Any]:
    """Return parameters, optimizer states, and the number of updates after one update."""
    trained, count = state["trained"], state["updates"] + 1
    each: dict[str, Any] = {}
    for name, p in trained.items():
        rule, rate = rules[name]
        update = _sgd if rule.kind == "sgd" else _adamw
        each[name] = update(rule, rate, p, gradients[name], state, name)
    memories = tuple({name: each[name][i + 1] for name in trained} for i in range(len(state["memories"])))
    return {"trained": {name: updated[0] for name, updated in each.items()}, "memories": memories, "updates": count}


def _sgd(rule: Optimizer, rate: float, p: Tensor, g: Tensor, state: dict[str, Any], name: str) -> tuple[Tensor, ...]:
    g = g + rule.weight_decay * p
    if not rule.momentum:
        return (p - rate * g,)
    memory = rule.momentum * state["memories"][0][name] + g
    return p - rate * (g + rule.momentum * memory if rule.nesterov else memory), memory


def _adamw(rule: Optimizer, rate: float, p: Tensor, g: Tensor, state: dict[str, Any], name: str) -> tuple[Tensor, ...]:
    count = (state["updates"] + 1).astype(p.dtype)
    m = rule.beta1 * state["memories"][0][name] + (1 - rule.beta1) * g
    v = rule.beta2 * state["memories"][1][name] + (1 - rule.beta2) * g * g
    step = (m / (1 - rule.beta1**count)) / (jnp.sqrt(v / (1 - rule.beta2**count)) + rule.eps)
    return p * (1 - rate * rule.weight_decay) - rate * step, m, v
