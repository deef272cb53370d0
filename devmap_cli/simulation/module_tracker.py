"""Which module is running, by its fully qualified name, and in which order modules ran first."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from devmap_cli.simulation.trace import Recorder


class ModuleTracker:
    """Follows every module call of the process while it is entered.

    The first module called from outside is taken for a root, and its submodules are named from there, unless
    `watch` named them before. Each thread has a stack of its own. `recorder` is told of every module entered and left.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.order: dict[str, None] = {}
        """Names of the modules that ran, in the order of their first call."""
        self.num_calls = 0
        """How many calls of modules there were."""
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []  # keeps what _names has the ids of
        self._threads = threading.local()
        self._handles: list[RemovableHandle] = []
        self._last_error: tuple[BaseException | None, str] = (None, "")
        self._recorder = recorder

    @property
    def current(self) -> str:
        """Name of the innermost module running in this thread, "" for none or the root."""
        stack = self._stack()
        return stack[-1] if stack else ""

    def watch(self, root: nn.Module) -> None:
        """Name the modules of `root` as seen from it."""
        self._roots.append(root)
        for name, module in root.named_modules():
            self._names.setdefault(id(module), name)

    def __enter__(self) -> ModuleTracker:
        from torch.nn.modules.module import (
            register_module_forward_hook,
            register_module_forward_pre_hook,
        )

        self._handles = [
            register_module_forward_pre_hook(self._on_enter),
            register_module_forward_hook(self._on_leave, always_call=True),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _stack(self) -> list[str]:
        stack: list[str] | None = getattr(self._threads, "stack", None)
        if stack is None:
            stack = self._threads.stack = []
        return stack

    def _on_enter(self, module: nn.Module, _args: Any) -> None:
        stack = self._stack()
        self.num_calls += 1
        name = self._names.get(id(module))
        if name is None:
            if not stack:
                self.watch(module)
            name = self._names.get(id(module), type(module).__name__)
        stack.append(name)
        self.order.setdefault(name)
        if self._recorder is not None:
            self._recorder.entered(name)

    def raised_in(self, error: BaseException) -> str:
        """Name of the innermost module that `error` came out of, "" if it is not the last error seen."""
        return self._last_error[1] if self._last_error[0] is error else ""

    def _on_leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        stack = self._stack()
        if not stack:
            return
        name = stack.pop()
        if self._recorder is not None:
            self._recorder.left(name)
        error = sys.exc_info()[1]
        if error is not None and error is not self._last_error[0]:
            self._last_error = (error, name)
