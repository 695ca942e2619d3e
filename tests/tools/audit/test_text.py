"""Tables that fit, and nothing from a model that a terminal would act on."""

import pytest

pytest.importorskip("pyarrow")

import trustrl
from support import recorded
from trustrl.errors import ConfigError, RecordError
from trustrl.tools.audit import TokenCounts, arm
from trustrl.tools.audit.audit_json import audit_report, check_names, record_files
from trustrl.tools.audit.audit_text import percent, printable, text


def test_every_line_fits_even_with_every_preset(tmp_path):
    (piece,) = recorded.pieces(recorded.record(tmp_path))
    arms = [arm(name, trustrl.preset(name)) for name in trustrl.presets()]
    arms.append(arm("a-very-long-name-of-an-arm-that-nobody-would-type", trustrl.preset("ppo")))
    shown = text(
        audit_report(
            TokenCounts.of(piece, arms), arms, record_files([tmp_path]), text_of=lambda _: printable("\x1b[2J")
        )
    )
    assert max(map(len, shown.splitlines())) <= 100
    assert "\x1b" not in shown
    for name in ("troll", "minirl", "dppo-topk-tv", "a-very-long-name-…"):
        assert name in shown


@pytest.mark.parametrize("char", ["\x1b", "\n", "\t", "\x00", "\x9b", "\u202e", "\u200b", "\x7f"])
def test_no_control_character_gets_through(char):
    assert printable(f"a{char}b").isprintable()
    assert printable("a b é 数") == "a b é 数"


@pytest.mark.parametrize(("share", "shown"), [(None, "–"), (0.0, "0.00%"), (0.1234, "12.34%"), (2e-6, "2e-04%")])
def test_small_shares_are_not_shown_as_none(share, shown):
    assert percent(share) == shown


def test_records_are_found_in_folders_runs_and_files_each_once(tmp_path):
    recorded.record(tmp_path / "run" / "records")
    files = record_files([tmp_path / "run"])
    assert record_files([tmp_path / "run" / "records", tmp_path / "run", files[0]]) == files
    with pytest.raises(RecordError, match="No records found"):
        record_files([tmp_path])


def test_the_name_of_the_records_is_taken():
    with pytest.raises(ConfigError, match="recorded"):
        check_names([arm("recorded", trustrl.preset("ppo"))])
