"""What a captured step must not read, since it is another at every step."""

from __future__ import annotations

from typing import Any

from crossfade.errors import CaptureError


class Unknown:
    """Something whose value would be baked into the captured step: any use of it is refused.

    >>> Unknown("training_step", "batch_idx") + 1
    Traceback (most recent call last):
    ...
    crossfade.errors.CaptureError: training_step reads batch_idx, which is another at every step: expected ...
    """

    def __init__(self, reader: str, name: str) -> None:
        object.__setattr__(self, "_said", f"{reader} reads {name}")

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CaptureError(
            f"{object.__getattribute__(self, '_said')}, which is another at every step",
            expected="a step that depends on its batch and the model",
            remedy="put what depends on it into a buffer of the model, or into the batch",
        )

    __getattr__ = __index__ = __int__ = __float__ = __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse
    __hash__ = None  # type: ignore[assignment]
