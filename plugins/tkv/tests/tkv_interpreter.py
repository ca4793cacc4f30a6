"""Makes Triton's interpreter run loops with run-time bounds under numpy 2.4, which refuses ``int(array of one element)``."""

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patched(tensor, scope):
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched
