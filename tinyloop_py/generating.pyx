"""Drawing tokens after one prompt, and the logits behind them."""

from libc.stdint cimport int32_t

from .generation cimport Generation
from .loaded_model cimport LoadedModel


class Generating:
    """Methods of Model."""

    __slots__ = ()

    def generate(
        LoadedModel self, prompt, max_tokens=128, loops=None, temperature=1.0, top_k=50, cache_window=0, *,
        top_p=1.0, min_p=0.0, repetition_penalty=1.0, logit_bias=None, seed=None, stop_tokens=None,
    ):
        """Draw tokens after a prompt.

        Parameters
        ----------
        prompt : 1-D integer buffer or sequence
            Token ids, at least one.
        max_tokens : int
            Most tokens to draw; 0 runs the prompt only.
        loops : int, optional
            Depth: how often the core runs per token; None is the model's default.
        temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, seed
            How a token is drawn: bias, repetition penalty, temperature, then what top_k, top_p and min_p keep. Temperature 0
            is greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off. The same seed gives the same tokens.
        cache_window : int
            Sliding window of attention in positions, 0 for none.
        stop_tokens : collection of int, optional
            Ids that end the output, the stop token included; None takes the file's, () none.

        Returns
        -------
        list of int
            Prompt and drawn tokens.

        Raises
        ------
        TypeError, ValueError
            An argument is not of its kind or out of range.
        RuntimeError
            The model is closed, or prompt and max_tokens exceed max_seq_len.
        OutOfMemoryError
            Memory or kv_budget does not suffice; a RuntimeError.
        """
        cdef Generation generation = self.open_generation(
            "generate", prompt, max_tokens, loops, temperature, top_k, cache_window, None, None, top_p, min_p, repetition_penalty,
            logit_bias, seed, stop_tokens,
        )
        return generation.run()

    def logits(LoadedModel self, tokens, loops=None, cache_window=0, *, last_only=False):
        """Logits after every token, float32 (n, vocab_size), or after the last alone, (1, vocab_size).

        Bit-identical to what generating the same tokens computes. Errors are those of `generate`.
        """
        cdef tuple key = self.pool_key("logits", loops, cache_window, None)
        cdef int none
        cdef const int32_t[::1] view = self.prompt_tokens(tokens, 0, &none, "tokens")
        self.warn_depth(key[1])
        return self._engine.logits(view, key[1], key[2], bool(last_only))
