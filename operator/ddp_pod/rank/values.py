"""Texts of the values that failing code has worked on: sizes, numbers and names of classes, no content of strings."""

import _thread
import ast
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from enum import Enum
from itertools import islice
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Final

from .module_facts import find_module_facts
from .script_objects import (
    bypass_modes,
    find_member,
    find_module_name,
    is_instance,
    is_module,
    list_bases,
    list_names,
    list_own_members,
    read_attributes,
    read_property,
    read_tensor,
)

MISSING: Final = object()
_MOST_OPERANDS: Final = 64
_MOST_KEYS: Final = 8
_MOST_ITEMS: Final = 3
NAME_LIMIT: Final = 40  # characters
_DIGITS: Final = 20
_MOST_ELEMENTS: Final = 1 << 20  # of a tensor whose numbers are compared
_MOST_EXAMINED: Final = 1 << 26  # of all tensors of a statement that are examined for numbers that are not finite
_SERIAL: Final = 1 << 15  # at::internal::GRAIN_SIZE: no operation on so many elements uses other threads
_CODE: Final = (
    ModuleType, FunctionType, BuiltinFunctionType, MethodType, type,
    ClassMethodDescriptorType, MethodDescriptorType, WrapperDescriptorType,
)  # fmt: skip
_PLAIN: Final = (bool, int, float, str, list, tuple, dict)  # of a class; any other may be a descriptor
_NATIVE_MODULES: Final = ("torch", "torch.nn.functional")
MODULE_TABLES: Final = ("_parameters", "_buffers", "_modules")
"""The attributes of a module in which it has its parameters, buffers and modules by name."""


class Values:
    """Texts of values, such as ``labels: int64[4] of 0 to 7``."""

    def __init__(self) -> None:
        self._texts: dict[str, bool] = {}  # and whether it has more than the name of a class
        self._tensors: list[Any] = []
        self._tensors_of_texts: dict[str, Any] = {}
        self._values: list[Any] = []
        self._strings: list[str] = []  # names of those values

    def add(
        self,
        frame: FrameType,
        operands: Iterable[ast.expr],
        ways: Mapping[int, str] = MappingProxyType({}),
        *,
        tensors_only: bool = False,
    ) -> None:
        """Add the values that a frame has for operands, each value once.

        ``ways``: how the script's own line reaches a value of a library's function, by the value's id.
        """
        for operand in islice(operands, _MOST_OPERANDS):
            node, value = read_operand(frame, operand)
            tensors = _list_tensors(value)
            is_known = any(value is known for known in self._values)
            if value is MISSING or is_known or is_instance(value, *_CODE) or (tensors_only and not tensors):
                continue
            if value is not None and type(value) not in (bool, int):
                self._values.append(value)
            name = (ways.get(id(value)) or ast.unparse(node))[:NAME_LIMIT]
            if type(value) is str:
                self._strings.append(name)
            description = describe(value)
            text = f"{name}: {description}"
            if text not in self._texts and name != description:
                self._texts[text] = not text.endswith(f": {list_names(type(value))[0]}")
                self._tensors += tensors
                self._tensors_of_texts |= dict.fromkeys([text], tensors[0]) if is_tensor_value(value) else {}

    def list_texts(self) -> list[str]:
        """Return the texts; those with mere names of classes only if there is no other.

        Tensors of equal shapes may differ in their numbers alone, which are then shown for floating ones, too.
        """
        texts = [text for text, is_detailed in self._texts.items() if is_detailed] or list(self._texts)
        shown = self._tensors_of_texts if self._have_equal_shapes() else {}
        return [f"{text}{_describe_range(shown[text])}" if text in shown else text for text in texts]

    @property
    def are_known(self) -> bool:
        """Whether there is any text."""
        return bool(self._texts)

    def _have_equal_shapes(self) -> bool:
        return len(self._tensors) > 1 and len({tuple(tensor.shape) for tensor in self._tensors}) == 1

    @property
    def device(self) -> str:
        """The device of all tensors; empty: they have none in common."""
        devices = {tensor.device.type for tensor in self._tensors}
        return str(*devices) if len(devices) == 1 else ""

    @property
    def is_diverged(self) -> bool:
        """Whether a tensor has a number that is not finite, or may have one."""
        if sum(tensor.numel() for tensor in self._tensors) > _MOST_EXAMINED:
            return True
        return any(_is_diverged(tensor) for tensor in self._tensors)

    def find_difference(self, message: str) -> str:
        """Return in what tensors differ: device, dtype of floating numbers, or shape; empty: there are no two.

        ``batch``: only in their first sizes, or one has a single row. ``type``: none of the first, and a message names
        the dtype of one, as BFloat16; with the method that converts to another one that it names. ``text``: there are
        no tensors, and a message quotes the types of a string and of something else; with the string's name.
        """
        if len({str(tensor.device) for tensor in self._tensors if tensor.dim()}) > 1:
            return "device"
        if len({tensor.dtype for tensor in self._tensors if tensor.is_floating_point()}) > 1:
            return "dtype"
        names = {tensor.type().rpartition(".")[2].removesuffix("Tensor") for tensor in self._tensors}
        named = [
            word for word in re.findall(r"\b[A-Z]\w+\b", message) if hasattr(sys.modules.get("torch"), f"{word}Tensor")
        ]
        if names.intersection(named):
            expected = next((name for name in named if name not in names), "")
            return f"type .{expected.lower()}()" if expected else "type"
        quoted = set(re.findall(r"'(\w+)'", message))
        if not self._tensors and len(self._strings) == 1 and "str" in quoted and len(quoted) > 1:
            return f"text {self._strings[0]}"
        return self._compare_shapes() if len(self._tensors) > 1 else ""

    def _compare_shapes(self) -> str:
        shapes = [tuple(tensor.shape) for tensor in self._tensors]
        has_one_row = any(len(shape) > 1 and shape[0] == 1 for shape in shapes)
        differ_first = len({shape[1:] for shape in shapes}) == 1 and len(set(shapes)) > 1 and all(shapes)
        return "batch" if has_one_row or differ_first else "shape"


def read_operand(frame: FrameType, node: ast.expr) -> tuple[ast.expr, Any]:
    """Return an operand's value, or that of the part of it which is known, with that part; MISSING: unknown."""
    if isinstance(node, ast.Name):
        value = frame.f_locals.get(node.id, MISSING)
        return node, frame.f_globals.get(node.id, MISSING) if value is MISSING else value
    if isinstance(node, ast.Constant):
        return node, node.value
    if not isinstance(node, (ast.Attribute, ast.Subscript)):
        return node, MISSING
    part, owner = read_operand(frame, node.value)
    if part is not node.value or owner is MISSING:
        return part, owner
    value = _read_attribute(owner, node.attr) if isinstance(node, ast.Attribute) else _read_item(frame, owner, node)
    return (part, owner) if value is MISSING else (node, value)


def _read_attribute(owner: Any, name: str) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and name == "grad" and is_instance(owner, torch.Tensor):
        return read_property(torch, owner, "grad")
    attributes = list_attributes(owner)
    tables: list[Any] = [attributes, *(attributes.get(table) for table in MODULE_TABLES)]
    for table in tables:
        if is_instance(table, dict) and dict.__contains__(table, name):
            return dict.get(table, name)
    member = find_member(type(owner), name)
    return member if type(member) in _PLAIN else MISSING


def list_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object, a module or a class."""
    if type(owner) is ModuleType:
        return vars(owner)
    if is_instance(owner, type):
        return {name: value for base in reversed(list_bases(owner)) for name, value in list_own_members(base).items()}
    return read_attributes(owner)


def _read_item(frame: FrameType, owner: Any, node: ast.Subscript) -> Any:
    key = read_operand(frame, node.slice)[1]
    if _is_plain_table(owner) and type(key) in (str, int):
        return dict.get(owner, key, MISSING)
    if type(owner) in (list, tuple) and type(key) is int and -len(owner) <= key < len(owner):
        return owner[key]
    return MISSING


def _is_plain_table(value: Any) -> bool:
    """Return whether an item of a value is that of a dict, as for OrderedDict and defaultdict."""
    return is_instance(value, dict) and find_member(type(value), "__getitem__") is vars(dict)["__getitem__"]


def is_tensor_value(value: Any) -> bool:
    """Return whether a value is a tensor of a class without further code."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and read_tensor(torch, value) is not None


def is_native_function(module: Any, name: str) -> bool:
    """Return whether torch, or torch.nn.functional, has a function that is not Python under a name."""
    is_torch = type(module) is ModuleType and module.__name__ in _NATIVE_MODULES
    return is_torch and type(vars(module).get(name)) is BuiltinFunctionType


def is_plain_call(frame: FrameType, node: ast.AST) -> bool:
    """Return whether code only works on values of Python's own types, by native code of Python, or of torch."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    operands = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    return all(_is_native_call(frame, call.func) for call in calls) and all(
        _is_plain(frame, operand) for operand in operands
    )


def _is_native_call(frame: FrameType, function: ast.expr) -> bool:
    """Return whether a function is native code of Python or, in a process without a GPU, of torch."""
    if isinstance(function, ast.Name):
        return type(frame.f_builtins.get(function.id)) is BuiltinFunctionType
    if not isinstance(function, ast.Attribute):
        return False
    part, owner = read_operand(frame, function.value)
    if part is not function.value or owner is MISSING:
        return False
    if type(owner) is ModuleType:
        member = vars(owner).get(function.attr)
        is_torch = is_native_function(owner, function.attr) and not sys.modules["torch"].cuda.is_initialized()
        is_python = type(member) is BuiltinFunctionType and is_of_python(member.__module__) and owner is not _thread
        return is_torch or is_python
    if is_instance(owner, type):
        return False  # a method of a class, which any extension may have made
    return is_of_python(find_module_name(type(owner))) and not is_instance(
        find_member(type(owner), function.attr), FunctionType
    )


def _is_plain(frame: FrameType, operand: ast.Name) -> bool:
    value = read_operand(frame, operand)[1]
    if value is MISSING:
        return operand.id in frame.f_builtins
    return type(value) is ModuleType or is_of_python(find_module_name(type(value)))


def is_of_python(module: Any) -> bool:
    """Return whether a module, by its name, belongs to Python itself."""
    return type(module) is str and module.partition(".")[0] in getattr(sys, "stdlib_module_names", ())


def describe_type(value: Any) -> str:
    """Return dtype and shape of a tensor or an array, or None; empty for other values."""
    if value is None:
        return str(value)
    if _is_array(value):
        return f"{value.dtype.name}{list(value.shape)}"
    tensors = [] if type(value) in (list, tuple) else _list_tensors(value)
    return _describe_layout(tensors[0]) if tensors else ""


def _is_array(value: Any) -> bool:
    kind = type(value)
    return (find_module_name(kind), list_names(kind)[0]) == ("numpy", "ndarray")


def _list_tensors(value: Any) -> list[Any]:
    torch: Any = sys.modules.get("torch")
    values = value[:_MOST_ITEMS] if type(value) in (list, tuple) else [value]
    tensors = [read_tensor(torch, item) for item in values] if torch is not None else []
    return [tensor for tensor in tensors if tensor is not None]


def describe(value: Any) -> str:
    """Return the text of a value."""
    kind = type(value)
    if value is None or kind is bool:
        return str(value)
    if kind in (int, float):
        return _describe_number(value)
    if kind in (str, bytes, bytearray):
        return f"{kind.__name__} of {len(value)}" if value else f"empty {kind.__name__}"
    if kind in (list, tuple, set, frozenset):
        return _describe_sequence(value)
    if is_instance(value, dict):
        return _describe_table(value)
    if _is_array(value):
        return f"{describe_type(value)}{_describe_finiteness(value)}"
    if find_module_name(kind) == "torch" and list_names(kind)[0] in ("dtype", "device", "Size"):
        return str(value)
    return _describe_object(value)


def _describe_finiteness(array: Any) -> str:
    if array.dtype.kind != "f" or not 0 < array.size <= _MOST_ELEMENTS:
        return ""
    return "" if bool(sys.modules["numpy"].isfinite(array).all()) else ", not finite"


def _describe_object(value: Any) -> str:
    tensors = _list_tensors(value)
    if tensors:
        return _describe_tensor(tensors[0])
    name = list_names(type(value))[0]
    if type(value) is datetime:
        return f"datetime with{'out' if value.tzinfo is None else ''} a time zone"
    if find_module_name(type(value)) == "builtins" and find_member(type(value), "__next__") is not None:
        return f"{name}, an iterator, which gives its items once"
    if is_instance(value, Enum):
        return f"{name}.{read_attributes(value).get('_name_')}"
    return f"{name}{find_module_facts(value)}" if is_module(value) else name


def _describe_number(value: float) -> str:
    if type(value) is int and value.bit_length() > 64:
        return f"integer of {value.bit_length()} bits"
    return repr(value)[:_DIGITS]


def _describe_sequence(value: Any) -> str:
    items = list(islice(value, _MOST_ITEMS))
    texts = [describe(item) for item in items if type(item) in (int, float, bool) or _list_tensors(item)]
    if len(texts) == len(value):
        return f"({', '.join(texts)})" if type(value) is tuple else f"[{', '.join(texts)}]"
    return f"{type(value).__name__} of {len(value)}{_quote(texts)}"


def _describe_table(value: Any) -> str:
    keys = [str(key) for key in islice(dict.keys(value), _MOST_KEYS) if type(key) in (str, int)]
    keys = [key for key in keys if len(key) <= NAME_LIMIT]
    return f"{list_names(type(value))[0]} of {dict.__len__(value)}{_quote(keys)}"


def _quote(texts: list[str]) -> str:
    return f" ({', '.join(texts)})" if texts else ""


def _describe_tensor(tensor: Any) -> str:
    text = _describe_layout(tensor)
    with suppress(RuntimeError):  # not every type of tensors has every operation
        text = f"{text}{_describe_numbers(tensor)}"
    return text


def _describe_layout(tensor: Any) -> str:
    text = str(tensor.dtype).removeprefix("torch.")
    with suppress(RuntimeError):
        text = f"{text}{list(tensor.shape)}"
    return text


def _describe_numbers(tensor: Any) -> str:
    """Return where a tensor is, or of which numbers. Raises: RuntimeError."""
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        return f" on {tensor.device}"
    if not 0 < tensor.numel() <= _MOST_ELEMENTS or tensor.layout != torch.strided:
        return ""
    with bypass_modes(torch), torch.no_grad():
        parts = _list_parts(tensor)
        if parts is None:
            return ""
        if tensor.is_floating_point() and not _are_finite(parts):
            return ", not finite"
        if tensor.numel() == 1:
            return f" of {_describe_number(tensor.item())}"
        if tensor.is_floating_point() or tensor.is_complex():
            return ""
        low, high = map(int, _find_ends(parts))
    return f" of {low} to {high}"


def _is_diverged(tensor: Any) -> bool:
    torch = sys.modules["torch"]
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return True
    try:
        with bypass_modes(torch), torch.no_grad():
            parts = _list_parts(tensor)
            return parts is None or not _are_finite(parts)
    except RuntimeError:  # not every type of tensors has every operation
        return True


def _list_parts(tensor: Any) -> "Sequence[Any] | None":
    """Return a tensor in parts whose operations run in the calling thread; None: that needs a copy.

    A process that was forked after its parent had used OpenMP would wait for its threads forever.
    """
    if tensor.numel() <= _SERIAL:
        return [tensor]
    return tensor.view(-1).split(_SERIAL) if tensor.is_contiguous() else None


def _are_finite(parts: "Iterable[Any]") -> bool:
    return all(bool(part.isfinite().all()) for part in parts)


def _find_ends(parts: "Iterable[Any]") -> tuple[Any, Any]:
    """Return the smallest and the largest number."""
    ends = [tuple(end.item() for end in part.aminmax()) for part in parts]
    return min(low for low, _ in ends), max(high for _, high in ends)


def _describe_range(tensor: Any) -> str:
    """Return between which numbers those of a floating tensor are; empty if that is not simple to find."""
    torch = sys.modules["torch"]
    with suppress(RuntimeError), bypass_modes(torch), torch.no_grad():
        is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_floating_point()
        parts = _list_parts(tensor) if is_plain and 1 < tensor.numel() <= _MOST_ELEMENTS else None
        if parts is not None and _are_finite(parts):
            low, high = _find_ends(parts)
            return f" of {low:.3g} to {high:.3g}"
    return ""
