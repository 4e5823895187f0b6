"""Time that passes only in waits."""

import asyncio


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to what is next, so that a wait takes no time."""

    def __init__(self):
        super().__init__()
        self.now, select = 0.0, self._selector.select

        def jump(timeout):
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = jump

    def time(self):
        return self.now


class Rewards:
    """Gives every episode 1, at once: graders work in threads, whose time the clock does not know."""

    async def reward(self, episodes):
        for episode in episodes:
            episode.reward, episode.reward_parts = 1.0, {"correct": 1.0}
        return ["" for _ in episodes]
