"""The page of performance says what the records say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks import performance, record


def test_the_page_is_what_its_text_and_the_records_make() -> None:
    assert performance.PAGE.read_text(encoding="utf-8") == performance.page(), "run python -m benchmarks.performance"


def test_a_word_that_cannot_be_filled_in_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = tmp_path / "performance.md"
    monkeypatch.setattr(performance, "SOURCE", text)
    text.write_text("{{ round }}")
    with pytest.raises(SystemExit, match="must begin with one of about, about-plain, rounds"):
        performance.page()


def of_ways(**times: float) -> dict[str, Any]:
    """A part of a record: the same times of every way, and CPU seconds of some."""
    row = {"least": 1.0, "median": 2.0}
    ways = {name: row | {"cpu": times.get(name.replace(" ", "_").replace("=", ""), 1.0)} for name in performance.NAMES}
    return {"124M": {"parameters": 10**8, "tensors": 2, "seconds": ways}}


def test_each_part_is_of_the_last_record_that_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    monkeypatch.setattr(performance, "SOURCE", tmp_path / "page.md")
    text = "{{ steps }} {{ ratio rounds / 124M / DeMo k=32 / AdamW fused / cpu }} {{ about wire / rounds }} {{ receive }}"
    (tmp_path / "page.md").write_text(text)
    assert "not recorded yet: `python -m benchmarks.wire --repeats 7 --record`" in performance.page()

    def add(name: str, **figures: Any) -> None:
        record.append(name, figures)

    add("wire", kernels="c-1", rounds=of_ways(DeMo_k32=6.0), steps={})
    add("wire", kernels="c-1", rounds={}, steps=of_ways(DeMo_k128=4.5, AdamW_fused=1.5))
    add("wire", kernels="off", rounds=of_ways(DeMo_k32=60.0), steps=of_ways(DeMo_k128=45.0))
    least = {"old": 10.0, "plain": 5.0, "kernels": 1.0}
    faster = {"old / plain": 2.0, "old / kernels": 10.0}
    given = {"size": "124M", "against": "e2cba8e", "workers": 8, "k": 128}
    record.append("receive", {**given, "least cpu seconds": least, "times as fast": faster})
    made = performance.page()
    assert "| **`DeMo`, k = 128** | 124M | 4.500 | 1.000 | 2.000 | 3.0 | 1.0 |" in made
    assert " 6.0 " in made and "60.0" not in made
    assert record.processor() in made
    assert "| with kernels | 1.000 | **10.0** |" in made


def test_every_word_is_used_by_the_page() -> None:
    text = performance.SOURCE.read_text(encoding="utf-8")
    assert not [word for word in performance.FILL if f"{{{{ {word} " not in text]
