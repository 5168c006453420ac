"""Watch for the import of one module in a rank, without importing it."""

import sys
from typing import Any


class ImportHook:
    """A finder of modules that calls ``watch`` once its module is loaded, and then steps aside."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._blind = False  # the module cannot be watched

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Let the other finders find the module, and watch it once it is loaded."""
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec: Any = next((one for one in found if one is not None), None)
        try:
            execute = spec.loader.exec_module

            def execute_and_watch(module: Any) -> None:
                execute(module)
                self.watch(module)

            spec.loader.exec_module = execute_and_watch
        except AttributeError:
            self._blind = True
        return spec

    def start(self) -> None:
        """Watch the module, which this rank's program will import or a fork server has imported already."""
        if self._module in sys.modules:
            self.watch(sys.modules[self._module])
        else:
            sys.meta_path.insert(0, self)

    def watch(self, module: Any) -> None:
        """Act on the loaded module."""
        raise NotImplementedError
