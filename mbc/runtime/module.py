"""The class that users work with: a compiled network that trains and predicts, on a GPU or on the CPU.

What it is opened on is in `opened_plan`, its states are in `module_states`; here is what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from numpy.typing import NDArray

from mbc.plan.model import Plan
from mbc.runtime.arguments import flag, matched, rate_of
from mbc.runtime.arrays import DeviceArray, Wanted, check_rows, received, rows_of, wanted_inputs
from mbc.runtime.bindings import Place
from mbc.runtime.launch_order import Transfers
from mbc.runtime.machine import Allocation, Figures, Machine
from mbc.runtime.membership import Membership
from mbc.runtime.module_states import StatefulPlan
from mbc.runtime.opening import Settings, open_plan
from mbc.runtime.output import DeviceOutput
from mbc.runtime.reported_metrics import ACCURACY, judged_rows
from mbc.runtime.sliding_window import Windows, predict
from mbc.runtime.step_loss import Loss

Array = NDArray[Any]
Output = Array | DeviceOutput


class Module(StatefulPlan):
    """A network as `mbc compile` wrote it. After construction nothing is allocated on the device.

    Calls of several threads run one after another. On a GPU a module works only in the thread and the process that
    opened it (MBC235); on the CPU a forked process has a module of its own. `copy.deepcopy` makes an independent module
    on the CPU; all other copies and pickles are refused (MBC234).

    A plan for several GPUs (`mbc compile --gpus`) needs one process for each GPU, started by mpirun, srun, torchrun or
    `mbc train --gpus`. Each process opens the module and calls the same methods in the same order, with its own rows.
    All start from equal parameters, `step` reports loss and metrics of the whole mini-batch, and `save` writes on rank
    0 alone.
    """

    def __init__(
        self, subject: str | Path | Plan, seed: int = 0, device: str = "auto", *, canaries: bool = False,
        eager: bool = False, prefetch: bool = True, shadow: bool = True,
        transfers: Transfers | str = Transfers.IN_ORDER, ranks: Membership | None = None, listener: int | None = None,
        allocate: Callable[[int], Allocation] | None = None, arena_of: Module | None = None,
    ) -> None:  # fmt: skip
        """Open the network and give all states their first values.

        Args:
            subject: The folder of a package, a plan file, or a `Plan`. A plan without a package runs on the CPU.
            seed: Seed of initial values, dropout and augmentation, from 0 to 2^63 - 1.
            device: `cuda`, `cpu` or `auto`. `auto` takes the GPU if there is one and the package was built for it;
                otherwise it warns and takes the CPU.
            canaries: On a GPU, surround the arena with a pattern for `check_canaries`.
            eager: On a GPU, run launch by launch, for memory checkers.
            prefetch: On a GPU, copy inputs in host memory while the step before runs, if the budget has room for these
                inputs a second time.
            shadow: On the CPU, check the owner of every byte.
            transfers: On the CPU, when copies run: `in_order`, `early` or `late`.
            ranks: The processes that share each mini-batch; None for those that the environment describes.
            listener: Address of a function that is called for each node of a GPU's graphs (`mbc/record/`).
            allocate: Returns device memory of so many bytes for the arena; None for CUDA's own allocator.
            arena_of: Another module on the device, in whose arena this one runs; the states keep their values.

        Raises:
            MbcError: MBC140 and MBC152 to MBC168 if the plan, the package or the machine does not allow it.
        """
        plan, folder, members = open_plan(subject, ranks)
        arena = None if arena_of is None else arena_of._opened_machine.arena
        settings = Settings(
            seed, device, canaries, eager, prefetch, shadow, transfers, members, listener, allocate, arena
        )
        self._train_inputs = wanted_inputs(plan.graph, plan.graph.inputs)
        self._infer_inputs = wanted_inputs(plan.graph, plan.graph.infer_inputs)
        # Rows that are missing would count in statistics of the mini-batch (`bn(track=false)`).
        self.whole_batches = any("batch_statistics" in op.kind for op in plan.graph.infer)
        self._judged = judged_rows(plan.graph)
        self._figures: Figures | None = None
        super().__init__(plan, folder, settings)

    def step(self, *inputs: object, lr: float, **named: object) -> Loss:
        """Train on one mini-batch, or on as many as `train { accumulate }` says.

        On a GPU the call returns while the step runs. An array in the GPU's memory must not be changed before the loss
        has been read.

        Args:
            *inputs: Inputs in the order of the source, with exactly `step_batch` rows: NumPy arrays, or anything with
                DLPack or `__cuda_array_interface__`.
            lr: The learning rate.
            **named: Inputs by name.

        Returns:
            The mean loss of the mini-batches before the update.

        Raises:
            MbcError: MBC145 to MBC151, MBC169, MBC230, MBC235 and MBC236.
        """
        rate = rate_of(lr)
        with self._turns:
            wanted, places = self._train_inputs, self._places.train_inputs
            arrays = self._received(wanted, inputs, named)
            ranks = self._plan.graph.ranks if self._plan.graph.optimizer.accumulate == 1 else None
            accumulate = self._plan.graph.optimizer.accumulate
            check_rows(wanted, arrays, self.step_batch, True, ranks, self.rank, accumulate)
            last = self.step_batch // self.batch - 1
            self._hand(self._machine, wanted, places, self._mini_batch(arrays, 0))
            with self._changing() as machine:
                for number in range(last):
                    machine.accumulate(self._next_control(rate, number), number)
                    self._hand(machine, wanted, places, self._mini_batch(arrays, number + 1))
                self._figures = machine.train(self._next_control(rate, last))
            return self._loss(self._figures)

    def _loss(self, figures: Figures) -> Loss:
        return Loss(figures, self._judged, self.step_batch // self.batch)

    def _mini_batch(self, arrays: Sequence[Array | DeviceArray], number: int) -> list[Array | DeviceArray]:
        """Return the rows of one mini-batch of a step."""
        rows = number * self.batch, (number + 1) * self.batch
        pairs = zip(self._train_inputs, arrays, strict=True)
        return [rows_of(array, *rows) if wanted.per_sample else array for wanted, array in pairs]

    @overload
    def forward(self, *inputs: object, copy: Literal[True] = True, **named: object) -> Array | tuple[Array, ...]: ...

    @overload
    def forward(self, *inputs: object, copy: bool, **named: object) -> Output | tuple[Output, ...]: ...

    def forward(self, *inputs: object, copy: bool = True, **named: object) -> Output | tuple[Output, ...]:
        """Return the outputs for 1 to `batch` rows, with running statistics and without dropout.

        A network with `bn(track=false)` needs `batch` rows, whose statistics it uses.

        Args:
            *inputs: The inputs on which outputs depend, in the order of the source.
            copy: Return NumPy arrays. False returns on a GPU a `DeviceOutput` (DLPack, `__cuda_array_interface__`)
                without waiting for the program: the memory to which the program writes, in the working precision,
                valid until the next `step` or `forward`. On the CPU False returns an array that cannot be written to.
            **named: Inputs by name.

        Returns:
            The output, or a tuple of several outputs in the order of the source.

        Raises:
            MbcError: MBC146 to MBC151, MBC167, MBC230, MBC235 and MBC236.
        """
        graph = self._plan.graph
        copy = flag("copy", copy)
        with self._turns:
            arrays = self._received(self._infer_inputs, inputs, named)
            rows = check_rows(self._infer_inputs, arrays, self.batch, exact=self.whole_batches)
            self._hand(self._machine, self._infer_inputs, self._places.infer_inputs, arrays)
            self._machine.infer()
            outputs: list[Output] = []
            for name, value in zip(graph.outputs, graph.infer_outputs, strict=True):
                place = self._places.infer_outputs[name]
                count = rows if graph.values[value].per_sample else place.shape[0]
                outputs.append(self._machine.read(place)[:count] if copy else self._machine.output(place, count))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def predict(self, images: Array, windows: Windows | None = None) -> Array:
        """Return the output for images of any size, predicted in windows of the network's input that overlap.

        Class numbers are `argmax(axis=1)` of the result. It is computed in fp32 and takes, beside itself, one number
        for each position.

        Args:
            images: [rows, channels, *size], which may be a memory map. Images smaller than the input are padded with
                zeros on both sides.
            windows: Overlap, weights, mirroring and average; None for the usual ones.

        Returns:
            [rows, channels of the output, *size]: probabilities if a loss makes them of logits. [rows, channels] if the
            output has no positions; the images then have the size of the input.

        Raises:
            MbcError: MBC380 and MBC381, and those of `forward`.
        """
        return predict(self._plan.graph, self.batch, self.forward, images, windows or Windows())

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last step by name; empty before the first step, and if nothing is classified or measured.

        `accuracy` is the share of the step's rows (positions, in segmentation) that were classified correctly, from 0
        to 1. If several losses classify, `accuracy` belongs to the first in the source, `accuracy_2` to the second, and
        so on. Metrics of the source have their own names.
        """
        return {} if self._figures is None else self._loss(self._figures).metrics

    @property
    def correct(self) -> float | None:
        """Number of rows (positions, in segmentation) of the last step that were classified correctly.

        It is None if nothing is classified. If several losses classify, it belongs to the first in the source.
        """
        return None if self._figures is None or ACCURACY not in self._judged else self._figures.values[1]

    @property
    def accuracy(self) -> float | None:
        """`correct` as a share of all rows. The accuracy of an earlier step is in the loss that the step returned."""
        return self.metrics.get(ACCURACY)

    def _received(
        self, wanted: Sequence[Wanted], inputs: tuple[object, ...], named: dict[str, object]
    ) -> list[Array | DeviceArray]:
        """Return all inputs, checked except for their number of rows."""
        given = matched([w.name for w in wanted], inputs, named)
        return [received(w, given[w.name], self._machine.stream) for w in wanted]

    @staticmethod
    def _hand(
        machine: Machine, wanted: Sequence[Wanted], places: Mapping[str, Place], arrays: Sequence[Array | DeviceArray]
    ) -> None:
        for w, array in zip(wanted, arrays, strict=True):
            machine.feed(places[w.name], array)

    def _overwrite(self, arrays: Mapping[str, Array], counters: Mapping[str, float]) -> None:
        super()._overwrite(arrays, counters)
        self._figures = None
