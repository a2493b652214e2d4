"""The pool of decoders: the same samples as in-process, and limits that hold."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from omni_client import audio
from omni_client.decoding import DecoderPool, Limits
from omni_runtime.errors import Cancelled, DeadlineExceeded, InvalidRequest, Overloaded


@pytest.fixture
async def pool() -> AsyncIterator[DecoderPool]:
    async with DecoderPool(workers=1, limits=Limits(seconds=20)) as pool:
        yield pool


@pytest.fixture(scope="module")
def clip() -> bytes:
    samples = np.sin(np.arange(48_000) * 0.05).astype(np.float32) * 0.3
    return audio.encode(samples, 24_000, "mp3")


def worker_pid(pool: DecoderPool) -> int:
    return next(iter([*pool._idle, *pool._busy]))._process.pid


async def until_busy(pool: DecoderPool) -> None:
    while not any(worker.served for worker in pool._busy):  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.mark.parametrize("rate", [None, 16_000])
async def test_the_same_samples_as_in_process(pool: DecoderPool, clip: bytes, rate: int | None) -> None:
    samples, heard = await pool.decode(clip, sample_rate=rate)
    expected, expected_rate = audio.decode(clip, sample_rate=rate)
    assert heard == expected_rate
    np.testing.assert_array_equal(samples, expected)
    samples[0] = 1.0  # an array like any other


async def test_a_refusal_keeps_its_words_and_the_worker(pool: DecoderPool, clip: bytes) -> None:
    await pool.decode(clip)
    pid = worker_pid(pool)
    for bad in (b"", b"some text\n" * 100, clip[:40]):
        with pytest.raises(InvalidRequest) as expected:
            audio.decode(bad)
        with pytest.raises(InvalidRequest) as caught:
            await pool.decode(bad, param="input_audio")
        assert (caught.value.message, caught.value.param) == (expected.value.message, "input_audio")
    await pool.decode(clip)
    assert worker_pid(pool) == pid


async def test_many_at_once(clip: bytes) -> None:
    async with DecoderPool(workers=2) as pool:
        results = await asyncio.gather(*(pool.decode(clip) for _ in range(20)))
    for samples, _ in results:
        np.testing.assert_array_equal(samples, results[0][0])


async def test_a_dead_worker_ends_one_request_and_is_replaced(pool: DecoderPool, clip: bytes) -> None:
    await pool.start()
    pid = worker_pid(pool)
    os.kill(pid, signal.SIGSTOP)
    request = asyncio.create_task(pool.decode(clip))
    await until_busy(pool)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(InvalidRequest, match="crashed") as caught:
        await request
    assert caught.value.param == "file"
    await pool.decode(clip)
    assert worker_pid(pool) != pid


async def test_a_worker_that_hangs_is_killed(clip: bytes) -> None:
    async with DecoderPool(workers=1, limits=Limits(seconds=0.2)) as pool:
        await pool.start()
        pid = worker_pid(pool)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match=r"longer than 0\.2 s"):
            await pool.decode(clip)
        await pool.decode(clip)
        assert worker_pid(pool) != pid


async def test_a_slow_file_meets_its_deadline() -> None:
    size = 2 * 48_000 * 600
    minutes = audio.wav_header(48_000, size) + bytes(size)
    async with DecoderPool(workers=1, limits=Limits(seconds=0.01)) as pool:
        with pytest.raises(DeadlineExceeded, match=r"longer than 0\.01 s"):
            await pool.decode(minutes)


async def test_decoded_size_is_limited() -> None:
    async with DecoderPool(workers=1, limits=Limits(decoded_bytes=100_000)) as pool:
        with pytest.raises(InvalidRequest, match="MiB when decoded"):
            await pool.decode(audio.encode(np.zeros(30_000, np.float32), 24_000, "flac"))
        assert (await pool.decode(audio.encode(np.zeros(20_000, np.float32), 24_000, "flac")))[0].size == 20_000


async def test_memory_is_limited() -> None:
    flac = audio.encode(np.zeros(20_000, np.float32), 24_000, "flac")
    picture = struct.pack(">I I10s I IIII I", 3, 10, b"image/jpeg", 0, 9, 9, 24, 0, 15 << 20) + bytes(15 << 20)
    # After the magic and STREAMINFO (4 + 38 bytes): a picture of 15 MiB that the demuxer holds in memory.
    heavy = flac[:42] + struct.pack(">I", 6 << 24 | len(picture)) + picture + flac[42:]
    async with DecoderPool(workers=1) as pool:
        assert (await pool.decode(heavy))[0].size == 20_000
    async with DecoderPool(workers=1, limits=Limits(memory_bytes=8 << 20)) as pool:
        with pytest.raises(InvalidRequest, match="memory"):
            await pool.decode(heavy)
        assert (await pool.decode(flac))[0].size == 20_000


async def test_an_hour_of_silence_is_decoded_in_bounded_memory() -> None:
    encoder = audio.Encoder("flac", 24_000)
    minute = np.zeros(24_000 * 60, np.float32)
    hour = b"".join(encoder.push(minute) for _ in range(60)) + encoder.close()
    async with DecoderPool(workers=1) as pool:
        samples, rate = await pool.decode(hour, sample_rate=16_000)
        assert (samples.size, rate) == (16_000 * 3_600, 16_000)
        assert not samples.any()
        print(f"an hour of silence: {len(hour) >> 10} KiB of FLAC, worker's peak {pool.peak_bytes >> 20} MiB")
        assert 0 < pool.peak_bytes < 200 << 20


async def test_too_long_is_refused(clip: bytes) -> None:
    async with DecoderPool(workers=1, limits=Limits(max_seconds=1)) as pool:
        with pytest.raises(InvalidRequest, match="limit of 1 seconds"):
            await pool.decode(clip)


async def test_more_than_may_wait_are_overloaded(clip: bytes) -> None:
    async with DecoderPool(workers=1, max_waiting=2) as pool:
        results = await asyncio.gather(*(pool.decode(clip) for _ in range(8)), return_exceptions=True)
    refused = [result for result in results if isinstance(result, Overloaded)]
    assert len(refused) == 5
    assert refused[0].retry_after


async def test_a_cancelled_request_frees_its_slot(pool: DecoderPool, clip: bytes) -> None:
    await pool.start()
    os.kill(worker_pid(pool), signal.SIGSTOP)
    request = asyncio.create_task(pool.decode(clip))
    await until_busy(pool)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert (await pool.decode(clip))[1] == 24_000


async def test_closing_ends_what_runs(clip: bytes) -> None:
    pool = DecoderPool(workers=1)
    await pool.start()
    pid = worker_pid(pool)
    os.kill(pid, signal.SIGSTOP)
    request = asyncio.create_task(pool.decode(clip))
    await until_busy(pool)
    await pool.close()
    with pytest.raises(Cancelled):
        await request
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(Cancelled):
        await pool.decode(clip)


async def test_secrets_stay_out_of_the_worker(pool: DecoderPool, clip: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_API_KEY", "hunter2")
    await pool.decode(clip)
    environment = await asyncio.to_thread(Path(f"/proc/{worker_pid(pool)}/environ").read_bytes)
    assert b"PATH=" in environment
    assert b"hunter2" not in environment


async def test_damaged_files_never_break_the_pool() -> None:
    generator = np.random.default_rng(0)
    samples = np.sin(np.arange(24_000) * 0.05).astype(np.float32) * 0.3
    files = [audio.encode(samples, 24_000, format) for format in ("wav", "flac", "mp3", "opus", "aac")]

    def damaged(data: bytes) -> bytes:
        body = np.frombuffer(data, np.uint8).copy()
        places = generator.integers(0, generator.choice([64, body.size]), size=generator.integers(1, 20))
        body[places] = generator.integers(0, 256, size=places.size)
        return body.tobytes()

    async with DecoderPool(workers=2, limits=Limits(seconds=20, max_seconds=60)) as pool:
        tried = [damaged(data) for data in files for _ in range(40)]
        results = await asyncio.gather(*(pool.decode(data) for data in tried), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                assert isinstance(result, InvalidRequest | DeadlineExceeded), result
            else:
                assert np.isfinite(result[0]).all()
                assert np.abs(result[0]).max() <= 1
        assert sum(isinstance(result, InvalidRequest) for result in results) > 20
        assert (await pool.decode(files[0]))[0].size == samples.size
