"""The pod's code, before the ranks start."""

from ...base.launcher_part import LauncherPart
from ...base.pod import Pod
from .unpack import has_packages, prepare_code, use_packages


def _prepare(pod: Pod, signals: list[int], former: str) -> bool:
    """Unpack the code and install its packages. Returns whether packages were installed. Raises: PodSetupError."""
    return pod.code is not None and prepare_code(pod.code, signals, former)


def _can_import_early(pod: Pod) -> bool:
    """Let Python find the packages of a former run. Returns False if there are none yet."""
    if pod.code is None or not pod.code.requirements:
        return True
    if not has_packages(pod.code):
        return False
    use_packages(pod.code)
    return True


PART = LauncherPart(prepare=_prepare, can_import_early=_can_import_early)
