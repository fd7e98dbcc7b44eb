"""A text game: find a number from 0 to 9 with four guesses; after each one the game says `higher` or `lower`."""

from rlscale.agents import Action, StepResult, Task

MAX_GUESSES = 4


class Guess:
    """The game of one trajectory; the label of the row is the number."""

    def __init__(self) -> None:
        self._secret, self._left = 0, MAX_GUESSES

    def reset(self, task: Task) -> str:
        """Chooses the number and says what to do."""
        self._secret, self._left = int(task.label), MAX_GUESSES
        return "guess 0-9"

    def step(self, action: Action) -> StepResult:
        """Compares one guess with the number."""
        self._left -= 1
        text = action.text.strip()
        guess = int(text) if len(text) == 1 and text in "0123456789" else None
        if guess == self._secret:
            return StepResult(reward=1.0, done=True)
        answer = "no number" if guess is None else "higher" if self._secret > guess else "lower"
        return StepResult(messages=answer, reward=0.0, done=self._left == 0)
