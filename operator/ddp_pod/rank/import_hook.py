"""Watch for the import of one module in a rank, without importing it."""

import sys
from typing import Any


class ImportHook:
    """Meta path finder that calls ``watch`` after its module is loaded, and then removes itself."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._blind = False  # whether the module's loader cannot be wrapped

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Delegate to the remaining finders, and wrap the loader so that ``watch`` runs after the import."""
        if name != self._module:
            return None
        sys.meta_path.remove(self)

        spec = self._find_with_remaining_finders(name, path, target)
        try:
            execute = spec.loader.exec_module

            def execute_and_watch(module: Any) -> None:
                execute(module)
                self.watch(module)

            spec.loader.exec_module = execute_and_watch
        except AttributeError:
            self._blind = True
        return spec

    @staticmethod
    def _find_with_remaining_finders(name: str, path: Any, target: Any) -> Any:
        for finder in sys.meta_path:
            if not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def start(self) -> None:
        """Watch the module: now if it is loaded, as in a fork of the fork server, otherwise once it is imported."""
        if self._module in sys.modules:
            self.watch(sys.modules[self._module])
        else:
            sys.meta_path.insert(0, self)

    def watch(self, module: Any) -> None:
        """Act on the loaded module."""
        raise NotImplementedError
