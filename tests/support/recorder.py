"""Looks at the logits of every position that an engine computes."""

from collections import defaultdict


class LogitRecorder:
    """Wraps the model of an `LLM`: afterwards ``logits[row_key][position]`` holds what was computed there.

    A row is known by its first page, which no other live row shares, and by how often that page began a row.
    """

    def __init__(self, llm) -> None:
        self.runner = llm._built.core._executor
        self.inner = self.runner.model
        self.runner.model = self
        self.logits = defaultdict(dict)
        self.steps = []
        self._begun = defaultdict(int)

    def forward(self, batch, layers):
        hidden = self.inner.forward(batch, layers)
        logits = self.inner.compute_logits(hidden)
        for row in range(batch.num_rows):
            first, last = int(batch.cu_seqlens_q_host[row]), int(batch.cu_seqlens_q_host[row + 1])
            page = int(batch.block_table_host[row, 0])
            self._begun[page] += int(batch.positions[first]) == 0
            key = page, self._begun[page]
            for i in range(first, last):
                self.logits[key][int(batch.positions[i])] = logits[i].clone()
        self.steps.append((batch.num_rows, batch.num_tokens))
        return hidden

    def compute_logits(self, hidden):
        return self.inner.compute_logits(hidden)
