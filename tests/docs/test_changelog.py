"""The changelog has a section for the version that the package says, in the form of Keep a Changelog."""

import re
from datetime import date
from pathlib import Path

import treering as tr

TEXT = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_newest_section_is_that_of_the_package() -> None:
    versions = re.findall(r"^## \[(.+)\](?: - (.+))?$", TEXT, re.MULTILINE)
    assert versions[0] == ("Unreleased", "")
    assert versions[1][0] == tr.__version__
    days = [date.fromisoformat(day) for _, day in versions[1:]]
    assert days == sorted(days, reverse=True)


def test_sections_have_the_usual_names_each_once_and_in_order() -> None:
    order = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for section in TEXT.split("\n## ")[1:]:
        kinds = re.findall(r"^### (.+)$", section, re.MULTILINE)
        assert kinds == [kind for kind in order if kind in kinds]
        entries = re.findall(r"^- .*(?:\n  .*)*", section, re.MULTILINE)
        assert len(entries) == len(set(entries))
