"""ATen operations that are one layer of the language, under another name or with other names of arguments.

The declarations of the layers name the operations (`mbc.ops.framework_calls`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mbc.interchange.aten.base import Call, Rule
from mbc.interchange.aten.operands import Refused, Result
from mbc.interchange.aten.operation_schemas import schema_of
from mbc.interchange.steps import Setting
from mbc.ops import LAYERS
from mbc.ops.base import Layer
from mbc.ops.framework_calls import OPERANDS, one_call


@dataclass(frozen=True, slots=True)
class Renaming:
    """A layer of one tensor that computes an ATen operation.

    Attributes:
        layer: Name of the layer.
        target: Name of the operation.
        operand: Argument that is the tensor.
        settings: By argument, the layer's setting.
        constants: By argument, the value for which the layer computes the operation.
        defaults: By argument, the value of an argument that is left out.
    """

    layer: str
    target: str
    operand: str
    settings: Mapping[str, str]
    constants: Mapping[str, int | float | str]
    defaults: Mapping[str, Any]

    def is_meant(self, call: Call) -> bool:
        """Return whether the arguments of a call have the values for which the layer computes it."""
        given = {name: call.argument(name) for name in self.constants}
        return all(
            (self.defaults[name] if given[name] is None else given[name]) == value
            for name, value in self.constants.items()
        )

    def settings_of(self, call: Call) -> dict[str, Setting]:
        """Return the settings of the layer for a call."""
        return {setting: call.real(name, self.defaults[name]) for name, setting in self.settings.items()}


def _renaming(layer: Layer) -> Renaming | None:
    call = one_call(layer.calls.torch)
    schema = schema_of(f"aten.{call.function}.default") if call is not None else None
    numbers = all(parameter.kind in ("float", "real") for parameter in layer.parameters)
    if call is None or schema is None or layer.inputs != (1, 1) or not numbers:
        return None
    parameters = [parameter.name for parameter in schema.parameters]
    names = {parameters[key] if isinstance(key, int) else key: name for key, name in call.names.items()}
    constants = {parameters[key] if isinstance(key, int) else key: value for key, value in call.constants.items()}
    operand = next(name for name, value in names.items() if value == OPERANDS[0])
    settings = {name: value for name, value in names.items() if name != operand}
    defaults = {parameter.name: parameter.default for parameter in schema.parameters}
    return Renaming(layer.name, f"aten.{call.function}.default", operand, settings, constants, defaults)


_ALL = [renaming for renaming in map(_renaming, LAYERS.values()) if renaming is not None]
RENAMINGS: Mapping[str, list[Renaming]] = {
    renaming.target: [other for other in _ALL if other.target == renaming.target] for renaming in _ALL
}


def layer_of(call: Call) -> tuple[str, dict[str, Setting]]:
    """Return the layer that computes a call, and its settings.

    Raises:
        Refused: No layer computes the call with these arguments.
    """
    for renaming in RENAMINGS[call.node.target]:
        if renaming.is_meant(call):
            return renaming.layer, renaming.settings_of(call)
    raise Refused("no layer of the language takes its arguments", "use its defaults")


def _renamed(call: Call) -> Result:
    operand = RENAMINGS[call.node.target][0].operand
    layer, settings = layer_of(call)
    return call.elementwise(layer, call.lazy(operand), settings)


RULES: Mapping[str, Rule] = dict.fromkeys(RENAMINGS, _renamed)
NOT_TAKEN: Mapping[str, str] = {}
