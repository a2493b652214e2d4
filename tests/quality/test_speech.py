"""What is spoken can be read back, and what people say is understood as the recogniser itself understands it."""

import wave
from pathlib import Path

import jiwer
import numpy as np
import pytest
from omni_client import Client
from whisper_normalizer.english import EnglishTextNormalizer

SENTENCES = (Path(__file__).parent / "sentences.txt").read_text().splitlines()
CLIPS = Path("/usr/share/pocketsphinx/test/data")
BOUND = 0.10

normalise = EnglishTextNormalizer()


@pytest.fixture(scope="module")
def client(stack):
    with Client(stack.grpc_url) as client:
        yield client


def test_thirty_sentences_are_read_back(client, record_property):
    assert len(SENTENCES) == 30
    heard, wrong = [], []
    for number, sentence in enumerate(SENTENCES):
        speech = client.speak(sentence, seed=number)
        text = client.transcribe(speech.audio, speech.sample_rate).text
        heard.append(normalise(text))
        rate = jiwer.wer(normalise(sentence), heard[-1])
        if rate:
            wrong.append(f"{rate:.2f} {sentence!r} -> {text!r}")
    overall = jiwer.wer([normalise(sentence) for sentence in SENTENCES], heard)
    print(f"word error rate {overall:.3f} over {len(SENTENCES)} sentences", *wrong, sep="\n")
    record_property("word_error_rate", overall)
    assert overall <= BOUND, wrong


def test_one_long_text_is_read_back(client):
    text = " ".join(SENTENCES)
    speech = client.speak(text, seed=1)
    heard = client.transcribe(speech.audio, speech.sample_rate).text
    assert jiwer.wer(normalise(text), normalise(heard)) <= BOUND


def human_clips():
    if not CLIPS.is_dir():
        raise FileNotFoundError(f"{CLIPS} is missing: apt-get install pocketsphinx-testdata")
    for path in sorted([*CLIPS.glob("*.raw"), *CLIPS.glob("cards/*.wav"), *CLIPS.glob("librivox/*.wav")]):
        if path.suffix == ".raw":
            yield path.name, np.fromfile(path, "<i2").astype(np.float32) / 32_768
            continue
        with wave.open(str(path)) as file:
            assert file.getframerate() == 16_000
            yield path.name, np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32_768


@pytest.mark.long
def test_human_speech_is_understood_as_by_the_recogniser_itself(client, built):
    from faster_whisper import WhisperModel

    model = WhisperModel(str(built / "whisper_tiny_en" / "1"), device="cpu", compute_type="int8", cpu_threads=2)
    clips = dict(human_clips())
    assert len(clips) >= 10
    for name, audio in clips.items():
        segments, _ = model.transcribe(
            audio, language="en", beam_size=5, temperature=0.0, condition_on_previous_text=False
        )
        direct = "".join(segment.text for segment in segments).strip()
        assert direct
        assert normalise(client.transcribe(audio, 16_000).text) == normalise(direct), name
