from utils.newest import Newest


def test_the_oldest_entry_goes_when_there_are_too_many_and_none_for_an_entry_that_is_set_again():
    kept = Newest(2)
    for key in "abc":
        kept[key] = key.upper()
    assert kept == {"b": "B", "c": "C"}
    for key in "bcb":
        kept[key] = len(kept)
    assert kept == {"b": 2, "c": 2}
