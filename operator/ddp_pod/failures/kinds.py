"""Kinds of failures that are recognized more precisely than by their category, each with its remedy.

``rules.find_kind`` compares them with exceptions. A new one is an entry of ``KINDS``, and a script with its answer in
``tests/failures/planted.py``. ``mistakes.recurs`` may still end the job where the table says that a restart may help.
"""

import errno
import re
import signal
from collections.abc import Collection
from typing import Final, NamedTuple

from ..base.exceptions import (
    ADDRESS_SPACE,
    CLOSED_OUTPUT,
    CUT_ARCHIVE,
    ENDED_READER,
    HIDDEN_PACKAGE,
    HTML_PAGE,
    LFS_POINTER,
    NO_FOLDER,
    NO_GRADIENTS,
    NOT_EXECUTABLE,
    PICKLED_NAME,
    STORE_KEY,
)
from ..contract.failure_table import KILLED, NODE_FAULT, OOM, USER_ERROR, Outcome
from ..contract.failure_text import NON_FINITE_REMEDY
from ..contract.names import EXIT_OOM, EXIT_RETRYABLE, EXIT_USER_ERROR
from .crashes import SHARED_MEMORY_REMEDY, SIGNALS

FATAL: Final = Outcome(USER_ERROR.name, EXIT_USER_ERROR)
SCRIPT_ERROR: Final = Outcome(USER_ERROR.name, EXIT_RETRYABLE)
OUT_OF_MEMORY: Final = Outcome(OOM.name, EXIT_OOM)
FAULT_OF_NODE: Final = Outcome(NODE_FAULT.name, EXIT_RETRYABLE)

CODE: Final = "<code>"
VALUES: Final = "<values>"
NO_DEVICES: Final = "No CUDA GPUs are available"
# Ranks call different collectives. TORCH_DISTRIBUTED_DEBUG=DETAIL names them; gloo notices only the sizes.
OTHER_SIZES: Final = re.compile(r"op\.preamble\.length <= op\.nbytes")
MISMATCH: Final = re.compile(rf"mismatch between collectives|{OTHER_SIZES.pattern}")
PEERS: Final = "Dist(Backend|Network|Store)Error|gloo|nccl|ProcessGroup|TCPStore|c10d|rendezvous|caused pair closure"
"""Libraries and messages about other ranks, in any case of letters."""
REFUSED_ARGUMENTS: Final = re.compile(r"(\[\S+\s\S+\s)?ProcessGroup\w+(::\w+|\.cpp:\d+\]\sCheck)")
"""The beginning of a message by which a process group refuses the arguments of a collective, before it calls peers."""
_COMPILE_ERRORS: Final = ("torch._dynamo.exc.", "torch._inductor.exc.")
# Checks of arguments by torch and NumPy; the same words may be about a device or the peers.
TENSORS: Final = re.compile(
    r"(?is)\A(Runtime|Value|Index)Error: "
    r"(?!.*(\b(CUDA|HIP|cu(DNN|BLAS)\w*) error|nccl|gloo|enforce fail|allocat|`nan`|tensor\(\[[^)]*\bnan\b))"
    r".*\b(tensors?|shapes?|dims?|dimensions?|dtypes?|strides?|channels?|storages?|require[sd]? grad"
    r"|(input|scalar) type)\b"
)


class FailureKind(NamedTuple):
    """A kind of failures. ``symptom`` is its name for readers of the table."""

    symptom: str
    errnos: tuple[int, ...] = ()
    types: tuple[str, ...] = ()
    """Classes of the exception or their bases; with a dot at the end those of a package."""
    where: str = ""
    """A regular expression of message, path, file or source line that an exception of errnos and types matches."""
    unlike: tuple[str, ...] = ()
    """Classes of those packages that belong to another kind."""
    statuses: Collection[int] = ()
    """Of HTTP."""
    contents: tuple[str, ...] = ()
    """What was found instead: see ``read_files`` and ``circumstances``."""
    words: str = ""
    """A regular expression of messages."""
    own_words: bool = False
    """Whether messages count that the script itself has written."""
    outcome: Outcome | None = SCRIPT_ERROR
    """None: by the origin of the exception."""
    may_pass: bool = False
    """Whether another attempt may escape it, unless its file or path is known to stay as it is."""
    remedy: str = ""
    """``CODE`` stands for the code of the script that failed, ``VALUES`` for what it got, in brackets if known."""


UNKNOWN_KIND: Final = FailureKind("", outcome=None)
SHARED_MEMORY: Final = FailureKind(
    "No shared memory", may_pass=True, errnos=(errno.ENOSPC,), where=r"/dev/shm|</torch_|\(shm\)",
    words=r"/dev/shm|\(shm\)", remedy=SHARED_MEMORY_REMEDY,
)  # fmt: skip
FULL_VOLUME: Final = FailureKind(
    "No space left", may_pass=True, errnos=(errno.ENOSPC,),
    words=r"iostream error|unexpected pos \d+ vs \d+|\d requested and \d+ written",
    remedy="the disk or volume is full: delete old checkpoints, enlarge it, or raise the limits of "
        "ephemeral-storage and emptyDir; if it has space, a quota or ulimit -f")  # fmt: skip
NO_GPU: Final = FailureKind(
    "No GPU", outcome=FATAL,
    words=r"(?i)no GPUs found|NCCL built in|not compiled with CUDA|Found no NVIDIA driver|CUDA-capable device is "
    r"detected|'torch\._C' has no attribute '_cuda_|requires CUDA support|dummy base class \w*(CUDA|Event|Stream)"
    r"|accelerator device when none is available|on a CUDA device but torch\.cuda\.is_available\(\) is False"
    rf"|accelerator support: None|start of device string: None|{NO_DEVICES}",
    remedy="the pod has no GPU: request one in resources.limits (nvidia.com/gpu), or train on CPUs: backend "
        "gloo, map_location='cpu'")  # fmt: skip
NON_FINITE: Final = FailureKind(
    "A non-finite loss", own_words=True, remedy=NON_FINITE_REMEDY,
    words=r"(?i)\b(loss|gradients?)\b[^\n]{0,80}\b(nan|inf|infinite|not finite|not a finite|non-?finite)\b"
    r"|\b(nan|inf|infinite|non-?finite)\b (loss|gradients?)\b|returned nan values in its"
    r"|tensor\(\[[^)]*\bnan\b"
    r"|\b(isfinite|isnan|isinf)\(")  # fmt: skip
HELPER: Final = FailureKind(
        "An ended helper process", may_pass=True,
        errnos=(errno.ECONNRESET, errno.ECONNREFUSED, errno.EPIPE, errno.ENOENT),
        types=("EOFError", "concurrent.futures.process.BrokenProcessPool"),
        where=r"[/\\]multiprocessing[/\\](connection|managers|resource_sharer)|process pool",
        words="DataLoader worker .* (killed by signal|exited unexpectedly)",
        remedy="a DataLoader worker or helper process was killed or crashed: see its error, raise the "
        "container memory limit, or use smaller workers")  # fmt: skip
OTHER_SIZE: Final = FailureKind(
        "Another number of ranks", own_words=True,
        words=r"(?i)\b(match(es)?|equal|divisible|bigger)\b[^\n]{0,200}\bworld.?size\b"
        r"|\bworld.?size\b[^\n]{0,200}(\b(match(es)?|equal|divisible|multiple)\b|!=)",
        remedy="the number of ranks does not fit: change it, by --nodes and --procs (spec.nodes, "
        "spec.procPerNode), or what it must fit, in Lightning "
        "Trainer(num_nodes=int(os.environ['GROUP_WORLD_SIZE']), "
        "devices=int(os.environ['LOCAL_WORLD_SIZE']))")  # fmt: skip
COLLECTIVES: Final = FailureKind(
        "Mismatch between collectives", words=MISMATCH.pattern,
        remedy="all ranks must call the same collectives, in one order, with equal shapes: look for one under a "
        "condition (`if rank == 0`), and data of unequal length; TORCH_DISTRIBUTED_DEBUG=DETAIL names "
        "them")  # fmt: skip
OTHER_MODELS: Final = FailureKind(
        "Ranks with different models", outcome=FATAL, words="of the same param in process|expects same model across",
        remedy="build the same model in every rank: its parameters differ")  # fmt: skip
TERMINAL: Final = FailureKind(
        "Input from a terminal", types=("EOFError", "bdb.BdbQuit"), where=r"reading a line|^bdb\.", outcome=FATAL,
        remedy="a pod has no terminal: remove breakpoint(), pdb.set_trace() and input()")  # fmt: skip
SHARED_LIBRARY: Final = FailureKind(
        "A shared library is missing", words="cannot open shared object file", outcome=None,
        remedy="install the library in the image (under ddp run in the environment), or correct "
        "LD_LIBRARY_PATH")  # fmt: skip
UNFIT_TENSORS: Final = FailureKind(
        "Tensors that do not fit", words=TENSORS.pattern, outcome=None,
        remedy="compare shapes, types and devices with the message, also of the last, smaller batch "
        "(drop_last=True)")  # fmt: skip
KINDS: Final = (
    FailureKind(
        "A slow DataLoader", may_pass=True, words="DataLoader timed out after",
        remedy="make its workers faster, or raise its timeout"),
    FailureKind(
        "Too many open files", may_pass=True, errnos=(errno.EMFILE, errno.ENFILE), words="received 0 items of ancdata",
        remedy="close files, clone kept tensors of DataLoader workers, call "
        "torch.multiprocessing.set_sharing_strategy('file_system'), or raise ulimit -n"),
    FailureKind(
        "A locked file", may_pass=True, errnos=(errno.EAGAIN,),
        where=r"(?i)lock file|flock|lockf|LOCK_", words="database is locked",
        remedy="open the file in one rank, retry, or for HDF5 on a volume without locks set "
        "HDF5_USE_FILE_LOCKING=FALSE"),
    FailureKind(
        "Too many processes", may_pass=True, errnos=(errno.EAGAIN,),
        where=r"(?s)\A(?!.*(without blocking|\b(read|recv|accept|send|write|flush|print)\w*\())",  # of a pipe or socket
        words="can't start new thread|pthread_create failed|[Tt]hread creation failed|resources for OMP thread",
        remedy="use fewer DataLoader workers and threads (OMP_NUM_THREADS), or raise ulimit -u or podPidsLimit"),
    FailureKind(
        "A limited address space", may_pass=True, contents=(ADDRESS_SPACE,),
        remedy="raise or remove the limit (ulimit -v, RLIMIT_AS)"),
    FailureKind(
        "Full GPU memory", types=("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"),
        words=r"(?i)(CUDA|HIP)( error:)? out of memory|STATUS_ALLOC_FAILED", outcome=OUT_OF_MEMORY,
        remedy="the GPU's memory is full, not the container's: use a smaller batch, gradient accumulation, or a "
        "narrower number format"),
    FailureKind(
        "Too many mappings", errnos=(errno.ENOMEM,), where="unable to mmap", outcome=OUT_OF_MEMORY,
        remedy=f"{OOM.remedy}; clone kept tensors of DataLoader workers (vm.max_map_count)"),
    FailureKind(
        "Out of memory", errnos=(errno.ENOMEM,), types=("MemoryError", "std.bad_alloc"), outcome=OUT_OF_MEMORY,
        words=r"(?i)out of memory|(can't|unable to) allocate|not enough memory", remedy=OOM.remedy),
    SHARED_MEMORY,
    FULL_VOLUME,
    FailureKind(
        "A limit of files", may_pass=True, errnos=(errno.EFBIG, errno.EDQUOT),
        remedy="raise the limit (ulimit -f, the file system's or a quota), delete old files, or write smaller ones"),
    FailureKind(
        "A rename across file systems", errnos=(errno.EXDEV,), outcome=FATAL,
        remedy="the paths are on different file systems: write the file beside its target, or use shutil.move()"),
    FailureKind(
        "A read-only file system", may_pass=True, errnos=(errno.EROFS,),
        remedy="write to a volume mounted without readOnly, such as DDP_CHECKPOINT_DIR (spec.checkpoint)"),
    FailureKind(
        "Not executable", may_pass=True, errnos=(errno.EACCES,), where=NOT_EXECUTABLE,
        remedy="make it executable (chmod +x), or start its interpreter"),
    FailureKind(
        "Permission denied", may_pass=True, errnos=(errno.EACCES,), words=r"File \S+ cannot be opened",
        remedy="let the process's user access that path: of a volume by "
        "template.spec.securityContext.fsGroup, of the image by runAsUser"),
    FailureKind(
        "A forbidden operation", may_pass=True, errnos=(errno.EPERM,),
        remedy="omit the operation (chown, mount, a device), or set runAsUser or fsGroup in "
        "template.spec.securityContext"),
    FailureKind(
        "An existing path", may_pass=True, errnos=(errno.EEXIST, errno.ENOTEMPTY),
        remedy="another rank or attempt may have created it: os.makedirs(path, exist_ok=True), or one file per rank"),
    FailureKind(
        "Address already in use", may_pass=True, errnos=(errno.EADDRINUSE,), outcome=None,
        remedy="use MASTER_ADDR and MASTER_PORT unchanged in the script, and no fixed port"),
    FailureKind(
        "A name or arguments beyond a limit", errnos=(errno.E2BIG, errno.ENAMETOOLONG),
        outcome=FATAL, words="AF_UNIX path too long",
        remedy="pass a file instead of 128 KiB of arguments, or shorten the name (255 bytes, of a socket 107: TMPDIR)"),
    FailureKind(
        "A failed volume", outcome=FAULT_OF_NODE, where=r"\A(?![^\n]*not connected(\n|\Z))",  # a socket has no path
        errnos=(errno.EIO, errno.ESTALE, errno.ENOTCONN),
        remedy="the storage behind the path failed (NFS, FUSE, a disk): check the volume and node "
        "(dmesg, CSI Events)"),
    FailureKind(
        "A program of another format", errnos=(errno.ENOEXEC,), outcome=FATAL,
        remedy="a script needs a first line such as #!/bin/bash, a binary the node's architecture (uname -m) and "
        "the image's C library"),
    HELPER,
    FailureKind(
        "A service that refuses access", may_pass=True, statuses=(401, 403, 407),
        remedy="check that the token or credentials in env (a Secret) allow this object"),
    FailureKind(
        "A missing object of a service", may_pass=True, statuses=(404, 410),
        remedy="correct the object's name, revision or address"),
    FailureKind(
        "An overloaded service", may_pass=True, statuses=(408, 425, 429, *range(500, 600)),
        remedy="retry with growing pauses, send fewer requests, or download before training "
        "(spec.inputs)"),
    FailureKind(
        "An untrusted certificate", may_pass=True, types=("ssl.SSLCertVerificationError",),
        words="CERTIFICATE_VERIFY_FAILED",
        remedy="mount the CA's certificate and set SSL_CERT_FILE and REQUESTS_CA_BUNDLE; if one has expired, "
        "use another address"),
    FailureKind(
        "An output that nobody reads", may_pass=True, contents=(CLOSED_OUTPUT,), errnos=(errno.EPIPE,),
        where=r"\bprint\(|\bstd(out|err)\b|isatty",
        remedy="what reads the script's output (head, tee) has ended: let it read all"),
    FailureKind("An ended reader", may_pass=True, contents=(ENDED_READER,), remedy=SIGNALS[signal.SIGPIPE].remedy),
    FailureKind(
        "A service outside of the job", may_pass=True,
        errnos=(errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT, errno.EPIPE, errno.EHOSTUNREACH,
                errno.ENETUNREACH),
        types=("ConnectionError", "socket.gaierror", "ssl.SSLError", "http.client.", "urllib.error.", "urllib3.",
               "requests.", "httpx.", "httpcore.", "aiohttp.", "botocore.", "grpc.", "huggingface_hub.", "wandb.",
               "redis.", "pymongo.", "psycopg.OperationalError", "psycopg2.OperationalError"),
        unlike=("requests.exceptions.MissingSchema", "requests.exceptions.InvalidSchema",
                "requests.exceptions.InvalidURL", "requests.exceptions.InvalidHeader",
                "urllib3.exceptions.LocationValueError", "http.client.InvalidURL", "httpx.InvalidURL",
                "aiohttp.client_exceptions.InvalidURL", "botocore.exceptions.ParamValidationError",
                "huggingface_hub.errors.HFValidationError", "wandb.errors.errors.UsageError"),
        words="psycopg2?.OperationalError|couldn't connect to 'https?://|failure in name resolution",
        remedy="a request to a service failed, not to another rank: check its address, NetworkPolicies and proxies, "
        "retry, and download data before (spec.inputs)"),
    FailureKind(
        "A missing program", may_pass=True,
        errnos=(errno.ENOENT,), where=r"[/\\]subprocess\.py",
        words=": command not found|bad interpreter|env: .*: No such file|sh: .*: not found",
        remedy="install the program in the image, or correct its name, PATH or #! line"),
    SHARED_LIBRARY,
    FailureKind(
        "Another NumPy", outcome=FATAL, own_words=True,
        words=r"numpy\._?core\.\w+ failed to import|numpy\.\w+ size changed|_ARRAY_API not found"
        r"|compiled using NumPy \d|but this version of numpy|No module named 'numpy\._?core",
        remedy="pin NumPy's version in requirements.txt (often numpy<2), or upgrade the package that the traceback "
        "imports"),
    FailureKind(
        "No working folder", may_pass=True, contents=(NO_FOLDER,),
        remedy="keep the working folder, or start in another"),
    FailureKind(
        "Line ends of Windows", may_pass=True, errnos=(errno.ENOENT,), where=r"\\r\W", words=r"\\r\W|\^M",
        remedy="remove the line ends of Windows (dos2unix)"),
    FailureKind(
        "No such file or folder", may_pass=True, errnos=(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
        remedy="correct the path or link (relative ones start at the working directory), mount its volume, or create "
        "its folder; if another rank creates it, wait (dist.barrier())"),
    TERMINAL,
    FailureKind(
        "No real file", outcome=FATAL, contents=(LFS_POINTER, HTML_PAGE),
        remedy="fetch the file again (spec.inputs): a Git LFS pointer by git lfs pull where the image is packed, a "
        "web page with access"),
    FailureKind(
        "A damaged or incomplete file", may_pass=True, contents=(CUT_ARCHIVE,),
        types=("EOFError", "zipfile.BadZipFile", "zlib.error", "lzma.LZMAError"),
        words=r"failed finding central directory|invalid load key|Unsupported operand \d|\bfile\b[^\n]{0,40}\btruncated"
        r"|EOF: reading|Ran out of input|not fully covered|deserializing header|invalid magic number"
        "|unexpected EOF, expected",
        remedy="the file is incomplete or of another format: replace it, or resume from an earlier one, and write to a "
        "temporary name before os.replace()"),
    FailureKind(
        "A pickle of code that is absent", outcome=FATAL, contents=(PICKLED_NAME,),
        remedy="the file was pickled with code that is absent: add its folder to PYTHONPATH, or write it again as "
        "state_dict()"),
    FailureKind(
        "Objects in a checkpoint (weights_only)", outcome=FATAL, words="Weights only load failed",
        remedy="save only state_dict(), or if you trust the file, allow its classes by "
        "torch.serialization.add_safe_globals() or call torch.load(…, weights_only=False)"),
    FailureKind(
        "A checkpoint of another model", outcome=FATAL,
        words=r"(?s)loading state_dict(?!.*\bexception\b)|loaded state dict|Size mismatch between saved"
        r"|(?i:missing|unexpected) key\S* in (checkpoint )?state_dict",
        remedy="the checkpoint belongs to another model, optimizer or number of ranks: build the same, "
        "or drop what differs; keys module.* are of DDP: save model.module.state_dict()"),
    FailureKind(
        "No process group, or two", outcome=FATAL,
        words="Default process group has not been initialized|default process group twice",
        remedy="call torch.distributed.init_process_group() once in each rank, before everything that needs it, "
        "and destroy_process_group() last"),
    OTHER_SIZE,
    OTHER_MODELS,
    FailureKind(
        "An empty dataset", words="num_samples=0",
        remedy="this rank has no data: check paths, filters, shards"),
    FailureKind(
        "A script that starts itself", words="finished its bootstrapping phase", outcome=FATAL,
        remedy="start processes and loaders only under if __name__ == '__main__':"),
    FailureKind(
        "Parameters without a gradient in DDP", outcome=FATAL,
        words="Expected to have finished reduction",
        remedy="some parameters took no part in the loss: use all outputs of forward(), or pass "
        "find_unused_parameters=True; TORCH_DISTRIBUTED_DEBUG=DETAIL names them"),
    FailureKind(
        "Parameters used twice in DDP", words="mark a variable ready only once", outcome=FATAL,
        remedy="a parameter gets two gradients at once: checkpoint(use_reentrant=False), or static_graph=True"),
    FailureKind(
        "No gradients", contents=(NO_GRADIENTS,),
        remedy="call backward() before the step, and zero_grad() after it"),
    FailureKind(
        "A loss without a usable graph", outcome=FATAL,
        words="does not require grad|[Ii]n-?place (operation|update)|through the graph a second time",
        remedy="compute the loss in this step without no_grad() and detach(), call backward() once, and change no "
        "tensor in place (clone it; a parameter under no_grad())"),
    FailureKind(
        "Objects that cannot be pickled", types=("_pickle.PicklingError",),
        words=r"(?i:can(no|')t pickle) |Can't get (local object|attribute)",
        remedy="what is copied, saved or sent to a process is pickled: define functions and classes at "
        "a module's top level, open files there"),
    FailureKind(
        "An unknown user", own_words=True,
        words="getpw(uid|nam)|No username set in the environment|determine home directory",
        remedy="the image's /etc/passwd lacks the pod's user id: set USER and HOME (a writable folder) in "
        "env"),
    FailureKind(
        "A missing network interface", outcome=FATAL,
        words=r"Unable to find address for|no socket interface found|to a \(local\) address",
        remedy="GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME or TP_SOCKET_IFNAME names no interface with an "
        "address: remove it, or name one of `ip address`"),
    FailureKind(
        "Unsupported by torch.compile", types=_COMPILE_ERRORS,
        remedy="change the line that the message names, install the compiler (gcc, g++; for CUDA a -devel image), or "
        "set TORCHDYNAMO_DISABLE=1"),
    FailureKind(
        "Text in another encoding", types=("UnicodeError",),
        remedy="read and write text with its encoding: open(…, encoding=…), PYTHONUTF8=1"),
    FailureKind(
        "Invalid JSON, YAML or TOML",
        types=("json.decoder.JSONDecodeError", "yaml.error.YAMLError", "tomllib.TOMLDecodeError"),
        remedy="correct the JSON, YAML or TOML at the line in the message (a tag: for another loader); an empty file "
        "or web page is a failed download"),
    FailureKind(
        "A missing environment variable", types=("KeyError",), where=r"<frozen os>|[/\\]os\.py",
        words=": (unbound variable|parameter not set)",
        remedy="set the variable in env of the trainer (`--env NAME=VALUE`), or give it a default"),
    FailureKind(
        "A file that hides a module", contents=(HIDDEN_PACKAGE,), types=("ImportError", "AttributeError"),
        outcome=FATAL, where="partially initialized module|circular import",
        remedy="rename the file that has a library's name (such as torch.py), or let modules not import each other"),
    FailureKind(
        "A failed program", may_pass=True, types=("subprocess.CalledProcessError",),
        remedy="see its output above; a negative status is a signal"),
    FailureKind(
        "KeyboardInterrupt", types=("KeyboardInterrupt",), outcome=Outcome(KILLED.name, EXIT_RETRYABLE),
        remedy="a process or person sent SIGINT to the rank"),
    NO_GPU,
    FailureKind(
        "A script that expects a GPU", own_words=True, remedy=NO_GPU.remedy,
        words=r"(?i)cuda\S* (is )?(not |un)available|assert torch\.cuda\.is_available\(\)"),
    FailureKind(
        "Invalid device ordinal", words="(?i)invalid device ordinal", outcome=None,
        remedy="select the GPU of LOCAL_RANK, and set procPerNode to gpu"),
    FailureKind(
        "A fault of a GPU", outcome=FAULT_OF_NODE,
        words=r"(?i)uncorrectable (ECC|NVLink) error|fallen off the bus|GPU is lost|hardware stack error|Xid \d",
        remedy="the node's GPU has failed (nvidia-smi -q -d ECC, Xid in dmesg): have it reset or replaced"),
    FailureKind(
        "An index out of range", words="device-side assert", outcome=None,
        types=("IndexError",), where=r"[/\\]torch[/\\]nn[/\\]",
        remedy="usually a label beyond the classes or token beyond the vocabulary: compare it with the layer's "
        "size<values>; on CUDA set CUDA_LAUNCH_BLOCKING=1"),
    COLLECTIVES,
    FailureKind(
        "Builds of torch that differ", outcome=None,
        words=r"(?i)operator torch(vision|audio)::\w+ does not exist|undefined symbol: \w*(c10|torch|at)\w*",
        remedy="install versions of torch and its extension that belong together "
        "(https://pytorch.org/get-started/locally)"),
    NON_FINITE,
    FailureKind(
        "A key of the store", may_pass=True, contents=(STORE_KEY,),
        remedy="no rank has set that key in time: find out why"),
    FailureKind(
        "Another key", types=("multiprocessing.context.AuthenticationError",), outcome=FATAL,
        remedy="give both sides one authkey"),
    FailureKind(
        "A singular matrix", types=("torch._C._LinAlgError", "numpy.linalg.LinAlgError"), outcome=None,
        where="(?i)singular|positive.definite|converge",
        remedy="check the matrix<values>, add a small multiple of the identity, or use float64"),
    FailureKind(
        "A wait with a limit", may_pass=True, outcome=None, where=rf"(?is)\A(?!.*({PEERS}))",
        types=("TimeoutError", "concurrent.futures._base.TimeoutError", "_queue.Empty", "subprocess.TimeoutExpired"),
        remedy=f"{CODE} ended at its own limit: find out why, or raise it"),
    FailureKind(
        "An optimizer's state of another model", types=("RuntimeError",), outcome=None,
        where=r"(?s)\b(size|shape|dtype|device)s?\b.*[/\\]torch[/\\]optim[/\\]",
        remedy="the optimizer's state has other shapes, types or devices than the parameters: load that of this "
        "model"),
    FailureKind(
        "A batch", outcome=None, types=("RuntimeError", "TypeError"), where=r"[/\\]_utils[/\\]collate\.py",
        remedy="items differ in size or type, or are None: pad, convert or drop them (collate_fn)<values>"),
    UNFIT_TENSORS,
)  # fmt: skip
"""The most certain match decides, an errno before a type and words; then the place in this table."""
