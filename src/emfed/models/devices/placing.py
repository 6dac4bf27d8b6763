"""Rows onto a device: all at once where they fit, else block by block while others are computed."""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from emfed.core.errors import SettingsError
from emfed.core.wording import Setting, Wording

STREAM_BYTES = 1 << 28
"""Bytes of a block on its way to the card: large enough for the full speed of the bus."""
COPY_THREADS = 8
"""Threads that copy a block into pinned memory, on 16 cores: 1 moves 10 GB/s, 8 move 25, 16 move
21. The bus of an H200 takes 55."""
PIECE_BYTES = 1 << 24
"""Bytes of a file that a thread reads at once. Not tuned: a megabyte would do."""
PAGE = 4096
"""What places in a file, lengths and addresses are multiples of where the cache is left out."""
CACHED_SHARE = 0.5
"""The share of the host's memory up to which a file is read through the cache: the next pass then
has it from there, at 25 GB/s. Past the cache an H200's host reads 3.1 GB/s in every pass, into it
1.8 in the first (`python -m benchmarks.gpu`)."""
ROOM = 0.7
"""The share of the card's free memory that rows may take: passes need some as well."""


def check_device(name: Any) -> Any:
    """A torch device by its name, or a sentence that says why there is none."""
    asked = str(name)
    if find_spec("torch") is None:
        raise SettingsError(
            Wording(
                "{} needs torch, which is not installed: pip install torch, or leave {} out.",
                *(Setting("device", asked), Setting("device")),
            )
        )
    import torch

    try:
        device = torch.device(asked)
    except RuntimeError:
        raise SettingsError(setting="device", must="be 'cuda' or 'cuda:0'", got=asked) from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise SettingsError(setting="device", must="be 'cuda' or 'cuda:0'", got=asked)
    if not torch.cuda.is_available():
        raise SettingsError(
            Wording(
                "{}, but torch {} finds no GPU here: leave {} out, or run where nvidia-smi shows "
                "one.",
                *(Setting("device", asked), torch.__version__, Setting("device")),
            )
        )
    if (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(
            Wording(
                "{}: there are {} GPUs here.", Setting("device", asked), torch.cuda.device_count()
            )
        )
    return device


def fits(size: int, device: Any) -> bool:
    """Whether so many bytes of rows fit the card."""
    if device.type != "cuda":
        return True
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return size <= ROOM * free


def place(rows: Any, device: Any = None) -> Any:
    """An array as a tensor, on the device if one is given; what is there already is not copied."""
    import torch
    from array_api_compat import is_cupy_array

    tensor = torch.from_dlpack(rows) if is_cupy_array(rows) else torch.as_tensor(rows)
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.to(torch.float64)
    return (tensor if device is None else tensor.to(device)).contiguous()


def place_blocks(blocks: Iterator[Any], shape: tuple[int, int], device: Any) -> Any:
    """Blocks of rows on the device as one tensor there: the host never holds all of them."""
    import torch

    out: Any = None
    done = 0
    for block in blocks:
        if out is None:
            out = torch.empty(shape, dtype=block.dtype, device=device)
        out[done : done + len(block)] = block
        done += len(block)
    return out


def expect(table: Any, start: int, stop: int) -> None:
    """Tell the system that rows of a memory-mapped array are wanted soon: disks like to know."""
    mapped, stop = getattr(table, "_mmap", None), min(stop, len(table))
    if mapped is None or not hasattr(mapped, "madvise") or start >= stop:
        return
    base = np.frombuffer(mapped, np.uint8).ctypes.data
    first = table[start:stop].ctypes.data - base
    low = first - first % mmap.PAGESIZE
    mapped.madvise(mmap.MADV_WILLNEED, low, first + table[start:stop].nbytes - low)


def place_in_file(rows: Any) -> tuple[Path, int] | None:
    """The file of a memory-mapped array that nobody writes, and where in it these rows begin.

    None where they are better read through the cache.
    """
    mapped, name = getattr(rows, "_mmap", None), getattr(rows, "filename", None)
    if mapped is None or name is None or not {"O_DIRECT", "RWF_NOWAIT"} <= set(dir(os)):
        return None
    path, plain = Path(name), rows.mode == "r" and rows.flags.c_contiguous
    if not plain or rows.dtype not in (np.float32, np.float64) or not path.exists():
        return None
    if path.stat().st_size <= CACHED_SHARE * _memory():
        return None
    begins = rows.offset - rows.offset % mmap.ALLOCATIONGRANULARITY
    base = np.frombuffer(mapped, np.uint8).ctypes.data
    return path, begins + rows.ctypes.data - base


def read_file(pool: ThreadPoolExecutor, rows: Any, out: Any) -> Any:
    """Rows of a memory-mapped array, read into ``out`` by several threads; None if they can't be.

    What the system has in its cache comes from there. The rest goes past the cache, at the full
    speed of a disk: through the cache, one processor copies as fast as many disks read. ``out`` is
    memory that begins at a page and has two to spare; where the rows are in it is returned.
    """
    found = place_in_file(rows)
    if found is None:
        return None
    path, first = found
    low = first - first % PAGE
    skip, size = first - low, -(-(first + rows.nbytes - low) // PAGE) * PAGE
    whole = memoryview(out)
    files: list[int] = []

    def piece(at: int) -> int:
        target, done = whole[at : min(at + PIECE_BYTES, size)], 0
        try:
            os.preadv(files[0], [bytearray(1)], low + at + len(target) // 2, os.RWF_NOWAIT)
            file = files[0]
        except BlockingIOError:
            file = files[1]
        while done < len(target) and (got := os.preadv(file, [target[done:]], low + at + done)):
            done += got
            if done % PAGE:  # the end of the file
                break
        return done

    try:
        files = [os.open(path, os.O_RDONLY | flag) for flag in (0, os.O_DIRECT)]
        read = sum(pool.map(piece, range(0, size, PIECE_BYTES)))
    except OSError:  # a file system that knows nothing of this
        return None
    finally:
        for file in files:
            os.close(file)
    here = out[skip : skip + rows.nbytes].view(rows.dtype).reshape(rows.shape)
    # Another file may have the name by now.
    same = read >= skip + rows.nbytes and np.array_equal(here[:1], rows[:1], equal_nan=True)
    return here if same else None


def read_ahead(read: Callable[[int, int], Any], cuts: Sequence[tuple[int, int]]) -> Iterator[Any]:
    """Blocks in order, the next one read by a thread while this one is used."""
    with ThreadPoolExecutor(1) as pool:
        following = None
        for cut in cuts:
            block, following = following, pool.submit(read, *cut)
            if block is not None:
                yield block.result()
        if following is not None:
            yield following.result()


def stream(
    read: Callable[[int, int], Any],
    rows: int,
    width: int,
    size: int,
    device: Any,
    expected: Callable[[int, int], None] | None = None,
) -> Iterator[Any]:
    """All rows as tensors on the device, in order, the next ones read while these are used.

    A thread reads a block into pinned memory, unless it is there already, and starts its copy on a
    stream of its own; there are two blocks on their way and one in use. A tensor is good until the
    next one is asked for.
    """
    import torch

    if device.type != "cuda":
        for block in read_ahead(read, _cuts(rows, width * size)):
            yield torch.as_tensor(block)
        return
    step = max(b - a for a, b in _cuts(rows, width * size))
    kind = torch.float32 if size == 4 else torch.float64
    pinned: list[Any] = [None, None]  # made when the first rows come that are not pinned
    there = [torch.empty((step, width), dtype=kind, device=device) for _ in range(3)]
    side = torch.cuda.Stream(device)
    # The memory of `there` may have been another tensor's, which kernels under way still read.
    side.wait_stream(torch.cuda.current_stream(device))
    ready: queue.Queue[Any] = queue.Queue()
    free: queue.Queue[Any] = queue.Queue()
    for number in range(3):
        free.put((number, None))
    stopped = threading.Event()
    pool = ThreadPoolExecutor(COPY_THREADS)

    def fill() -> None:
        copied: list[Any] = [None, None]
        try:
            for turn, (start, stop) in enumerate(_cuts(rows, width * size)):
                number, used = free.get()
                if stopped.is_set():
                    return
                if copied[turn % 2] is not None:
                    copied[turn % 2].synchronize()
                host = read(start, stop)
                if not (isinstance(host, torch.Tensor) and host.is_pinned()):
                    if pinned[turn % 2] is None:
                        pinned[turn % 2] = _pages(step * width * size)
                    ahead = (2 * stop - start, 3 * stop - 2 * start)  # two blocks
                    soon = None if expected is None else partial(expected, *ahead)
                    host = torch.from_numpy(_brought(pool, host, pinned[turn % 2], size, soon))
                with torch.cuda.stream(side):
                    if used is not None:
                        side.wait_event(used)
                    there[number][: stop - start].copy_(host, non_blocking=True)
                    done = torch.cuda.Event()
                    done.record(side)
                copied[turn % 2] = done
                ready.put((number, stop - start, done))
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        while (found := ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            number, count, done = found
            torch.cuda.current_stream(device).wait_event(done)
            yield there[number][:count]
            used = torch.cuda.Event()
            used.record(torch.cuda.current_stream(device))
            free.put((number, used))
    finally:
        stopped.set()
        free.put((0, None))
        thread.join()
        pool.shutdown()
        side.synchronize()  # who stops early frees blocks that copies would still write to


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _brought(
    pool: ThreadPoolExecutor, rows: Any, room: Any, size: int, soon: Callable[[], None] | None
) -> Any:
    """Rows in pinned memory: out of their file, or copied while the system fetches what is next."""
    found = read_file(pool, rows, room)
    if found is None:
        if soon is not None:
            pool.submit(soon)
        count, width = rows.shape
        found = room[: count * width * size].view(f"f{size}").reshape(count, width)
        copy_rows(pool, found, np.asarray(rows))
    return found


def _pages(size: int) -> Any:
    """Pinned memory for so many bytes, from the begin of a page on, and two pages more."""
    import torch

    room = torch.empty(size + 3 * PAGE, dtype=torch.uint8, pin_memory=True).numpy()
    skip = -room.ctypes.data % PAGE
    return room[skip : skip + size + 2 * PAGE]


def copy_rows(pool: ThreadPoolExecutor, out: Any, rows: Any) -> None:
    """Rows into or out of pinned memory, by several threads: one alone is slower than the bus."""
    step = -(-len(rows) // COPY_THREADS)
    parts = [slice(start, start + step) for start in range(0, len(rows), step)]
    for _ in pool.map(lambda part: np.copyto(out[part], rows[part]), parts):
        pass


def _cuts(rows: int, row_bytes: int) -> list[tuple[int, int]]:
    step = max(1, STREAM_BYTES // row_bytes)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
