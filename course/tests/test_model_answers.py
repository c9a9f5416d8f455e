"""The instructors' answers: every open question has one, and only the passphrase opens them."""
import pytest

from course.grading import model_answers
from course.grading.model_answers import (SEALED, OpenQuestion, answered_digests, questions, questions_of, read_pages,
                                          seal, unseal, write_pages)
from reference.errors import UserError

PAGE = """\
# %% [markdown]
# ## Try it
#
# 1. Why is walkthrough 5 long?
#    (Look at it.)
# 2. Who knows?
#
# <details><summary>Answer</summary>
# Nobody.
# </details>
#
# 3. And now?
# 4. And then?
# 5. At last?
#
# <details><summary>Answer to 4</summary>
#
# Nothing.
# </details>
#
# Next: another page.

# %% [markdown]
# ## To think about
#
# - One?

# %% [markdown]
# **First** (5 points). Say it in
# words.
"""
TEXTS = ["Why is walkthrough 5 long? (Look at it.)", "And now?", "At last?", "One?", "Say it in words."]


def test_every_open_question_has_an_answer():
    """After a change of a question's wording, look at its answer, and seal it again: see model_answers.py."""
    answered, found = set(answered_digests(SEALED.read_text())), questions()
    assert [question for question in found if question.digest not in answered] == []
    assert len(found) > 70 and {one.page[:3] for one in found} >= {"01_", "02_", "lab"}


def test_the_questions_of_a_page_are_found():
    found = questions_of("01_page", PAGE)
    assert found == [OpenQuestion("01_page", text) for text in TEXTS], "that with a public answer is not open"


def test_a_digest_is_of_the_wording_and_not_of_numbers_of_walkthroughs():
    digest = OpenQuestion("01_page", TEXTS[0]).digest
    assert digest == OpenQuestion("07_page", TEXTS[0].replace("5", "11")).digest
    assert digest != OpenQuestion("01_page", TEXTS[0].replace("long", "short")).digest


def test_answers_are_sealed_and_opened_with_the_passphrase_alone():
    answers = {OpenQuestion("page", text).digest: f"Because of {i}." for i, text in enumerate(TEXTS)}
    sealed = seal(answers, "open sesame")
    assert unseal(sealed, "open sesame") == answers and answered_digests(sealed) == sorted(answers)
    assert "Because" not in sealed
    with pytest.raises(UserError, match="The passphrase does not open the answers"):
        unseal(sealed, "open sesam")
    with pytest.raises(UserError, match="do not belong to the list"):
        unseal(sealed.replace(sorted(answers)[0], "0" * 20), "open sesame")


def test_pages_are_written_and_read_again_unless_an_answer_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(model_answers, "questions", lambda: [OpenQuestion("page", text) for text in TEXTS])
    answers = {OpenQuestion("page", text).digest: f"Because:\n\n- {i}" for i, text in enumerate(TEXTS)}
    write_pages(tmp_path, answers)
    assert read_pages(tmp_path) == answers
    del answers[OpenQuestion("page", "And now?").digest]
    write_pages(tmp_path, answers)
    with pytest.raises(UserError, match="1 questions.*\npage: And now?"):
        read_pages(tmp_path)
