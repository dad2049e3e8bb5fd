"""Ways in which a kernel can misbehave, as statements of Python, and what each may be called."""

CRASH, DIRTY = ("CRASH", "OOM"), ("DIRTY", "CRASH")
WRONG = ("WRONG", "NON-FINITE", "LOGIC", "CRASH", "DIRTY")

RAISES = [
    "sys.exit(0)", "sys.exit()", "sys.exit('all is well')", "raise SystemExit(False)", "exit(0)",
    "raise KeyboardInterrupt", "raise GeneratorExit", "raise StopIteration", "raise MemoryError",
    "raise RecursionError", "raise BaseException('x')", "raise asyncio.CancelledError", "raise BrokenPipeError",
    "raise EOFError", "raise ConnectionResetError", "raise ImportError('no module')", "import nothing_of_that_name",
    "raise ValueError('[/b] [red]AGREES[/red]')", "raise ValueError('\\x1b[2J\\x1b[H1 passed')",
    "raise ValueError('\\udc80\\x00\\u202e')", "raise ValueError('x' * 10**6)", "raise ValueError('\\n' * 999)",
    "raise type('E', (Exception,), {'__str__': lambda self: sys.exit(0)})()",
    "raise type('E\\x1b[2J', (Exception,), {})()", "raise OSError(28, 'No space left on device')",
    "raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'no')", "raise TimeoutError", "raise NotImplementedError",
    "raise ExceptionGroup('many', [ValueError(1)])", "raise BaseExceptionGroup('many', [SystemExit(0)])",
    "assert False", "1 / 0", "pytest.skip('not here')", "pytest.xfail('known')", "pytest.exit('done', 0)",
    "pytest.importorskip('nothing_of_that_name')", "f = lambda: f(); f()", "raise_in_del()", "x.nothing()",
]  # fmt: skip
CHANGES = [
    "np.seterr(all='raise')", "np.seterr(all='ignore')", "np.set_printoptions(precision=1)", "os.chdir('/')",
    "os.environ.update(XLA_FLAGS='')", "os.environ.pop('PATH')", "warnings.simplefilter('error')",
    "warnings.resetwarnings()", "sys.setrecursionlimit(70)", "gc.disable()", "sys.path.clear()", "sys.path.append('x')",
    "jax.config.update('jax_enable_x64', True)", "jax.enable_x64(True).__enter__()",
    "jax.config.update('jax_debug_nans', True)", "torch.set_default_dtype(torch.float64)",
    "torch.set_grad_enabled(False)", "torch.set_num_threads(7)",
    "signal.signal(signal.SIGINT, signal.SIG_DFL)", "setattr(sys, 'stdout', None)",
    "ctypes.CDLL(None).fesetround(2048)",
]  # fmt: skip
RETURNS = [
    "return None", "return 'all is well'", "return [x + x]", "return (x + x, x)", "return x", "return (x + x)[:1]",
    "return (x + x).astype('bool') if hasattr(x, 'astype') else (x + x).bool()", "return 0 * x", "return lambda: x + x",
    "return (y for y in [x + x])", "return x / 0", "return np.float64(3)",
]  # fmt: skip
DIES = [
    "os._exit(0)", "os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGTERM)",
    "os.abort()", "ctypes.string_at(0)", "ctypes.CDLL(None)._exit(0)", "ctypes.CDLL(None).exit(0)",
    "os.execv('/bin/true', ['true'])", "signal.alarm(1); time.sleep(99)",
    "threading.Thread(target=os._exit, args=(0,)).start(); time.sleep(99)",
]  # fmt: skip
HANGS = ["time.sleep(9999)", "threading.Event().wait()"]

KERNELS = """
import asyncio, ctypes, gc, os, signal, sys, threading, time, warnings
import numpy as np, pytest
import jax, torch

class InDel:
    def __del__(self):
        raise SystemExit(0)

def raise_in_del():
    del_me = InDel()
    del del_me
    raise ValueError("and then some")

def good(x):
    {ways}
    return x + x
"""


def kernels(ways: list[str], first: int) -> str:
    """The source of a kernel that does the n-th way for a case of `first` + n rows."""
    lines = [f"if x.shape[0] == {first + n}: {way}" for n, way in enumerate(ways)]
    return KERNELS.format(ways="\n    ".join(lines))
