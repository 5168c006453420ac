"""The samples of a batch that PyTorch's collation could not combine: how many have which structure."""

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from types import TracebackType
from typing import Any, Final

from .script_objects import is_instance, list_names
from .values import NAME_LIMIT, describe_type

_FILE: Final = "torch/utils/data/_utils/collate.py"
_MOST_SAMPLES: Final = 4096
_MOST_KINDS: Final = 3
_MOST_FIELDS: Final = 4
_DEEPEST: Final = 3


def describe_batch(traces: Iterable[TracebackType]) -> str:
    """Return the samples that were to be combined when an exception was raised; empty: it was raised elsewhere."""
    frames = (trace.tb_frame for trace in traces if trace.tb_frame.f_code.co_filename.endswith(_FILE))
    first = next(frames, None)  # with whole samples; inner ones have their parts
    batch = None if first is None else first.f_locals.get("batch")
    if type(batch) not in (list, tuple) or not batch:
        return ""
    kinds = Counter(_describe_structure(sample) for sample in islice(batch, _MOST_SAMPLES))
    texts = [f"{count} of {kind}" for kind, count in kinds.most_common(_MOST_KINDS)]
    return f"the batch: {', '.join(texts)}"


def _describe_structure(value: Any, depth: int = 0) -> str:
    """Return types and shapes of a sample's parts, no numbers."""
    kind = type(value)
    if kind in (tuple, list) and depth < _DEEPEST:
        parts = [_describe_structure(part, depth + 1) for part in value[:_MOST_FIELDS]]
        parts += ["…"] if len(value) > _MOST_FIELDS else []
        return f"({', '.join(parts)})" if kind is tuple else f"[{', '.join(parts)}]"
    if is_instance(value, dict) and depth < _DEEPEST:
        fields = islice(dict.items(value), _MOST_FIELDS)
        shown = ((key, part) for key, part in fields if type(key) is str and len(key) <= NAME_LIMIT)
        return f"{{{', '.join(f'{key}: {_describe_structure(part, depth + 1)}' for key, part in shown)}}}"
    return describe_type(value) or list_names(kind)[0]
