from utils.newest import Newest


def test_the_oldest_entry_goes_when_there_are_too_many():
    kept = Newest(2)
    for key in "abc":
        kept[key] = key.upper()
    assert kept == {"b": "B", "c": "C"}


def test_an_entry_that_is_set_again_drops_none():
    kept = Newest(2)
    for key in "abab":
        kept[key] = len(kept)
    assert kept == {"a": 2, "b": 2}
