"""Which globals in a pickle are an attack, or as good as one?

None of these, nor anything else, is ever imported or run: the safety of :mod:`reshard.pickles`
doesn't rest on this list, which can't be complete. It only decides what a person is told. A
class of somebody's own program is left out and reported; a pickle that names ``os.system`` is
refused as a whole, because a checkpoint that does so is not one to trust in its other parts.
"""

from __future__ import annotations

import builtins
from typing import Final

#: Modules, packages and single names, with everything inside them, by why they are here.
_BY_REASON: Final = {
    "running code and programs": """
        builtins bdb cProfile code codeop commands concurrent ctypes cffi dill cloudpickle
        joblib doctest importlib imp pkgutil pkg_resources zipimport runpy pdb pickle
        _pickle pickletools marshal shelve profile.run profile.runctx profile.Profile timeit
        trace.Trace pty os nt posix posixpath ntpath subprocess popen2 sys sysconfig
        multiprocessing threading _thread thread asyncio signal sched atexit gc inspect
        types.FunctionType types.LambdaType types.CodeType types.MethodType
        types.BuiltinFunctionType types.ModuleType types.CellType types.new_class
    """,
    "building calls out of harmless parts": """
        operator _operator functools _functools codecs _codecs copyreg.add_extension weakref
    """,
    "files and the network": """
        io.open io.open_code io.FileIO _io.open _io.open_code _io.FileIO shutil tempfile
        glob fileinput zipfile tarfile sqlite3 _sqlite3 mmap socket _socket socketserver ssl
        http urllib urllib2 requests aiohttp httpx httplib ftplib smtplib poplib imaplib
        telnetlib xmlrpc webbrowser antigravity paramiko
    """,
    "the machine, installers, tools": """
        platform resource pwd grp getpass pip setuptools distutils ensurepip venv pydoc
        idlelib lib2to3 IPython
    """,
    "parts of libraries that load, compile or start something": """
        torch.hub torch.serialization torch.load torch.jit torch.package torch.fx
        torch.compile torch._dynamo torch._inductor torch.utils torch.ops torch.classes
        torch.multiprocessing torch.storage._load_from_bytes torch.distributed.rpc
        torch.distributed.run torch._utils._import_dotted_name torch.testing torch.onnx
        torch.export numpy.load numpy.loadtxt numpy.genfromtxt numpy.fromfile numpy.memmap
        numpy.save numpy.savez numpy.testing numpy.distutils numpy.f2py numpy.ctypeslib
        numpy.lib numpy.vectorize numpy.apply_along_axis numpy.fromfunction pandas.eval
        pandas.read_pickle yaml jinja2 keras.models
    """,
}
_NAMES: Final = frozenset(name for names in _BY_REASON.values() for name in names.split())


#: The only builtins that can be an object of somebody's program and do nothing.
_EXCEPTIONS: Final = frozenset(
    f"builtins.{name}"
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
)


def is_refused(qualname: str) -> bool:
    """Say whether a global, ``"module.name"``, is one that can run code or reach outside.

    Examples
    --------
    >>> is_refused("os.system"), is_refused("torch.hub.load"), is_refused("osprey.Model")
    (True, True, False)
    """
    if qualname in _EXCEPTIONS:
        return False
    parts = qualname.split(".")
    return any(".".join(parts[:end]) in _NAMES for end in range(1, len(parts) + 1))
