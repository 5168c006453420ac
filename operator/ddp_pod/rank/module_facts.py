"""What is unusual about a torch.nn.Module: no parameters, all frozen, or modules that it does not know as its own."""

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from .script_objects import (
    is_module,
    is_of_package,
    list_children,
    list_modules,
    list_parameters,
    read_attributes,
    read_property,
    strip_wrappers,
)

_MOST: Final = 4096  # parameters, modules, and items of a container
_CONTAINERS: Final[dict[type, str]] = {list: "nn.ModuleList", tuple: "nn.ModuleList", dict: "nn.ModuleDict"}


def find_module_facts(module: Any) -> str:
    """Return what is unusual, to follow the name of the module's class; empty: nothing."""
    unregistered = next(_find_unregistered(module), "")
    return f"{_describe_parameters(module)}{f' ({unregistered})' if unregistered else ''}"


def _describe_parameters(module: Any) -> str:
    torch = sys.modules["torch"]
    parameters = [parameter for _, parameter, _ in islice(list_parameters(module), _MOST)]
    if any(read_property(torch, parameter, "requires_grad") for parameter in parameters):
        return ""
    if parameters:
        return f" of {len(parameters)} parameters, all frozen (requires_grad=False)"
    is_function = is_of_package(module, "torch") and not list_children(module)  # such as a loss
    return "" if is_function else " without parameters"


def _find_unregistered(module: Any) -> Iterator[str]:
    """Yield the plain containers whose modules are not among those of the module, to which they belong."""
    parts = list_modules(module)
    registered = {id(part) for _, part in parts}
    for path, part in parts[:_MOST]:
        for name, value in list(read_attributes(part).items()):
            if type(value) not in _CONTAINERS:
                continue
            count = sum(is_module(item) and id(item) not in registered for item in _list_items(value))
            if count:
                name = strip_wrappers(f"{path}.{name}" if path else name)
                kind = type(value)
                modules = f"{count} module{'s' if count > 1 else ''}"
                yield f"{name} is a plain {kind.__name__} of {modules}: use {_CONTAINERS[kind]}"


def _list_items(container: Any) -> list[Any]:
    """Return the first values of a plain container."""
    return list(islice(container.values() if type(container) is dict else container, _MOST))
