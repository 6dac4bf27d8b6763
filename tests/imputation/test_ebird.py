"""The eBird Basic Dataset, by hand-written files in its format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import emfed
from emfed.imputation import read_ebird

HEADER = (
    "GLOBAL UNIQUE IDENTIFIER,COMMON NAME,SCIENTIFIC NAME,OBSERVATION COUNT,COUNTRY,COUNTRY CODE,"
    "STATE,STATE CODE,LOCALITY,LOCALITY ID,OBSERVATION DATE,OBSERVER ID,"
    "SAMPLING EVENT IDENTIFIER,ALL SPECIES REPORTED,GROUP IDENTIFIER"
).split(",")


def line(
    event: str,
    count: str,
    site: str = "L1",
    date: str = "2019-05-01",
    observer: str = "obsr1",
    group: str = "",
    species: str = "Mallard",
    state: str = "FR-75",
    complete: str = "1",
) -> dict[str, str]:
    latin = {"Mallard": "Anas platyrhynchos", "Common Buzzard": "Buteo buteo"}[species]
    values = [
        f"URN:{event}",
        species,
        latin,
        count,
        "France",
        "FR",
        'the "old" town',  # quotes are text in this format
        state,
        "somewhere",
        site,
        date,
        observer,
        event,
        complete,
        group,
    ]
    return dict(zip(HEADER, values, strict=True))


def write(path: Path, rows: list[dict[str, str]], names: list[str] = HEADER) -> Path:
    text = ["\t".join(names), *("\t".join(row[name] for name in names) for row in rows)]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def observations(tmp_path: Path) -> Path:
    rows = [
        line("S1", "3"),
        line("S2", "X", site="L2", observer="obsr2"),
        line("S3", "8", group="G7", observer="obsr3"),
        line("S4", "9", group="G7", observer="obsr4"),  # the same birds, told by a friend
        line("S6", "X", group="G8", observer="obsr3", date="2019-06-03"),
        line("S7", "5", group="G8", observer="obsr4", date="2019-06-03"),
        line("S8", "1", species="Common Buzzard"),
        line("S9", "4", state="FR-13", date="2019-07-01", site="L3"),
    ]
    return write(tmp_path / "ebd.txt", rows)


@pytest.fixture
def events(tmp_path: Path) -> Path:
    rows = [
        line("S1", ""),
        line("S20", "", site="L2", date="2019-05-09"),  # complete, without a Mallard
        line("S21", "", site="L2", date="2019-05-10", complete="0"),
        line("S22", "", site="L9", date="2019-06-11", group="G9", observer="obsr5"),
        line("S23", "", site="L9", date="2019-06-11", group="G9", observer="obsr6"),
        line("S4", "", group="G7"),  # the species is on the list of the group
    ]
    names = [n for n in HEADER if n not in ("COMMON NAME", "SCIENTIFIC NAME", "OBSERVATION COUNT")]
    return write(tmp_path / "sampling.txt", rows, names)


def test_groups_count_once_and_x_is_no_number(observations: Path) -> None:
    table = read_ebird(observations, species="Mallard", family="poisson")
    assert table.intake.uncounted == 1  # S2; of G8 the member with a number is taken
    assert table.intake.shared == 2
    assert table.intake.rows == 7
    assert table.intake.used == 4
    assert list(table.sites) == ["L1", "L3"]
    assert table.values.sum() == 3 + 8 + 5 + 4
    assert list(table.workers) == ["obsr1", "obsr3", "obsr4"]


def test_x_is_presence_under_bernoulli(observations: Path) -> None:
    table = read_ebird(observations, species="anas platyrhynchos", family="bernoulli")
    assert table.intake.uncounted == 0
    assert table.values.sum() == 5
    assert list(table.sites) == ["L1", "L2", "L3"]


def test_zeros_come_from_complete_checklists(observations: Path, events: Path) -> None:
    table = read_ebird(observations, events, species="Mallard", family="poisson")
    assert table.intake.zeros == 2  # S20 and, once, G9
    assert table.intake.shared == 3
    assert table.intake.used == 6
    assert table.values.sum() == 20
    assert np.count_nonzero(table.values == 0) == 2
    assert "L9" in table.sites


def test_regions_dates_and_bins(observations: Path) -> None:
    south = read_ebird(observations, species="Mallard", region="FR-13")
    assert list(south.sites) == ["L3"]
    may = read_ebird(observations, species="Mallard", region="france", until="2019-05-31")
    assert may.bins.labels() == ["2019-05"]
    assert read_ebird(observations, species="Mallard", bins="year").bins.count == 1


def test_what_it_says_of_a_file_that_will_not_do(observations: Path, tmp_path: Path) -> None:
    with pytest.raises(emfed.DataError, match="several species .'Anas platyrhynchos', 'Buteo"):
        read_ebird(observations)
    with pytest.raises(emfed.DataError, match="no observation of Dodo in any region"):
        read_ebird(observations, species="Dodo")
    with pytest.raises(emfed.DataError, match="no column 'COMMON NAME'"):
        read_ebird(write(tmp_path / "x.txt", [], ["SPECIES"]))
    bad = write(tmp_path / "bad.txt", [line("S1", "3"), line("S2", "2", date="May 2019")])
    with pytest.raises(
        emfed.DataError, match="line 3, column 'OBSERVATION DATE': 'May 2019' is no date"
    ):
        read_ebird(bad)
    with pytest.warns(emfed.EmfedWarning, match="left out"):
        assert read_ebird(bad, bad_rows="skip").intake.bad == {"date": 1}


def test_subspecies_of_a_checklist_add_up_before_groups_collapse(tmp_path: Path) -> None:
    """12 and 18 birds of two subspecies are 30, though two friends tell of them."""
    rows = [
        line("S1", "12", group="G1"),
        line("S1", "18", group="G1"),
        line("S2", "12", group="G1", observer="obsr2"),
        line("S2", "18", group="G1", observer="obsr2"),
        line("S3", "2", date="2019-06-01"),
        line("S3", "X", date="2019-06-01"),
    ]
    path = write(tmp_path / "ebd.txt", rows)
    table = read_ebird(path, family="poisson")
    assert table.values.tolist() == [30.0]
    assert (table.intake.summed, table.intake.shared, table.intake.uncounted) == (3, 1, 1)
    assert table.intake.rows == 6
    assert read_ebird(path, family="bernoulli").values.sum() == 2


def test_with_sampling_events_only_complete_checklists_count(tmp_path: Path) -> None:
    """Two sightings on incomplete lists would make a rate of 3 in 5 of what is 1 in 3."""
    rows = [line("S1", "1"), line("S2", "1", complete="0"), line("S3", "1", complete="0")]
    path = write(tmp_path / "ebd.txt", rows)
    names = [n for n in HEADER if n not in ("COMMON NAME", "SCIENTIFIC NAME", "OBSERVATION COUNT")]
    events = [*rows, line("S4", ""), line("S5", "")]
    sampling = write(tmp_path / "sampling.txt", events, names)
    table = read_ebird(path, sampling, family="bernoulli")
    assert table.values.sum() / table.weights.sum() == pytest.approx(1 / 3)
    assert table.intake.incomplete == 2
    assert table.intake.rows == 5
    asked = read_ebird(path, sampling, family="bernoulli", complete=False)
    assert asked.values.sum() / asked.weights.sum() == pytest.approx(3 / 5)
    assert read_ebird(path, complete=True, family="bernoulli").intake.used == 1
    assert read_ebird(path, family="bernoulli").intake.used == 3


EFFORT = [*HEADER, "PROTOCOL TYPE", "DURATION MINUTES", "EFFORT DISTANCE KM", "NUMBER OBSERVERS"]


def with_effort(
    row: dict[str, str], minutes: float, protocol: str = "Stationary", km: str = "", people: int = 1
) -> dict[str, str]:
    return row | dict(
        zip(EFFORT[len(HEADER) :], [protocol, f"{minutes:.0f}", km, str(people)], strict=True)
    )


def test_longer_checklists_do_not_make_a_trend(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for number in range(1500):
        year, site = int(rng.integers(0, 10)), int(rng.integers(0, 15))
        minutes = (20 + 40 * year / 9) * rng.uniform(0.5, 1.5)
        count = rng.poisson(minutes / 10 * (1 + site % 3))
        date, observer = f"{2010 + year}-05-{1 + number % 28:02d}", f"o{number % 20}"
        row = line(f"S{number}", str(count), f"L{site}", date, observer)
        rows.append(with_effort(row, minutes))
    path = write(tmp_path / "long.txt", rows, EFFORT)
    told = {"family": "poisson", "bins": "year", "groups": 4}
    table = read_ebird(path, **told)
    assert table.effort is not None
    duration = table.effort.describe()[0]
    assert duration["name"] == "log(duration)"
    assert abs(duration["coefficient"] - 1) < 3 * duration["error"] < 0.3
    structure = emfed.imputation.Structure(0, 1.0, 0.5, 0.5)
    options = {"structure": structure, "draws": 40}
    trend = emfed.impute(table, **options).trend()["estimate"]
    assert trend.max() / trend.min() < 1.25
    plain = read_ebird(path, checklists=emfed.imputation.Checklists(effort=()), **told)
    grown = emfed.impute(plain, **options).trend()["estimate"]
    assert grown[-1] / grown[0] > 2


def test_reporting_rates_are_of_a_checklist_of_median_effort(tmp_path: Path) -> None:
    """Odds of a report grow with minutes; presences alone have nothing to fit effort to."""
    rng = np.random.default_rng(1)
    seen, events = [], []
    for number in range(600):
        minutes = float(rng.integers(10, 120))
        row = line(f"S{number}", "X", f"L{number % 6}", f"20{10 + number % 5}-05-01")
        row = with_effort(row, minutes)
        events.append(row)
        if rng.random() < minutes / (minutes + 60):
            seen.append(row)
    names = [n for n in EFFORT if n not in ("COMMON NAME", "SCIENTIFIC NAME", "OBSERVATION COUNT")]
    files = write(tmp_path / "x.txt", seen, EFFORT), write(tmp_path / "all.txt", events, names)
    table = read_ebird(*files, family="bernoulli", bins="year")
    assert table.effort is not None
    duration = table.effort.describe()[0]
    assert abs(duration["coefficient"] - 1) < 3 * duration["error"] < 0.6
    assert 0.9 < table.weights.sum() / 600 < 1.1
    assert read_ebird(files[0], family="bernoulli", bins="year").effort is None


def test_the_customary_limits_of_effort_leave_checklists_out_and_say_so(tmp_path: Path) -> None:
    rows = [
        with_effort(line("S1", "3"), 60),
        with_effort(line("S2", "3"), 400),
        with_effort(line("S3", "3"), 60, "Traveling", "12.5"),
        with_effort(line("S4", "3"), 60, "Incidental"),
        with_effort(line("S5", "3"), 60, "Traveling", "2", people=30),
        with_effort(line("S6", "5"), 60, "eBird - Traveling Count", "2"),
    ]
    path = write(tmp_path / "limits.txt", rows, EFFORT)
    table = read_ebird(path, family="gaussian")
    assert table.values.sum() == 8
    told = {"protocol": 1, "duration": 1, "distance": 1, "observers": 1}
    assert table.intake.filtered == told
    assert table.intake.rows == 6
    none = emfed.imputation.Checklists(None, None, None, None)
    assert read_ebird(path, family="gaussian", checklists=none).values.sum() == 20
    with pytest.raises(emfed.SettingsError, match="effort must be among duration"):
        emfed.imputation.Checklists(effort=("weather",))
