"""New tokens and their text as they are drawn: generate_stream and stream_text."""

from libc.stdint cimport INT32_MAX

from .arguments cimport int_argument
from .generation cimport Generation
from .loaded_model cimport LoadedModel

from .text_stream import TextStream
from .token_stream import TokenStream


class Streaming:
    """Methods of Model."""

    __slots__ = ()

    def generate_stream(
        LoadedModel self, prompt, max_tokens=128, loops=None, temperature=1.0, top_k=50, cache_window=0, *,
        top_p=1.0, min_p=0.0, repetition_penalty=1.0, logit_bias=None, seed=None, stop_tokens=None, pool=None, namespace=None, logprobs=0,
    ):
        """`generate` (with a pool `generate_with_pool`) token by token.

        The prompt runs in this call, each new token at the stream's `next`.

        Parameters
        ----------
        pool : PrefixPool, optional
            Continue from the longest registered prefix that the prompt starts with.
        namespace : str, optional
            See `register_prefix`.
        logprobs : int
            Where not 0, the stream's `logprobs` keeps for each token its log-probability, and those of the likeliest
            this many: of the model's own distribution, before bias, penalty, temperature and filters.

        The other arguments and the errors are those of `generate`.

        Returns
        -------
        TokenStream
            An iterator over the new tokens, and a context manager.
        """
        cdef Generation generation = self.open_generation(
            "generate_stream", prompt, max_tokens, loops, temperature, top_k, cache_window, pool, namespace, top_p, min_p,
            repetition_penalty, logit_bias, seed, stop_tokens,
        )
        return start_stream(self, generation, logprobs)

    def stream_text(
        LoadedModel self, prompt, max_tokens=128, loops=None, temperature=1.0, top_k=50, cache_window=0, *,
        top_p=1.0, min_p=0.0, repetition_penalty=1.0, logit_bias=None, seed=None, stop_tokens=None, pool=None, namespace=None, logprobs=0,
        stop=None, skip_special_tokens=True,
    ):
        """The text that continues a prompt, in pieces as it is drawn.

        Parameters
        ----------
        prompt : str, or token ids as in `generate`
            A text is encoded by the model file's tokenizer.
        stop : str or sequence of str, optional
            Texts that end the output; no part of one is ever shown.
        skip_special_tokens : bool
            Leave special tokens out of the text.

        The other arguments and the errors are those of `generate_stream`; ValueError where the file has no tokenizer.

        Returns
        -------
        TextStream
            An iterator over pieces of text that never end inside a character, and a context manager.
        """
        self.check_open("stream_text")
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError("the model file has no tokenizer, expected one for text; generate_stream takes and gives token ids")
        stops = read_stops(stop)
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"prompt has half a surrogate pair at character {error.start}, expected text that UTF-8 can hold") from None
            prompt = tokenizer.encode(prompt).ids
        cdef Generation generation = self.open_generation(
            "stream_text", prompt, max_tokens, loops, temperature, top_k, cache_window, pool, namespace, top_p, min_p, repetition_penalty,
            logit_bias, seed, stop_tokens,
        )
        stream = start_stream(self, generation, logprobs)
        context = [generation.tokens[i] for i in range(generation.n_prompt)]
        return TextStream(stream, tokenizer, context, stops, generation.sampling.stop_tokens, bool(skip_special_tokens))


cdef object start_stream(LoadedModel model, Generation generation, object logprobs):
    cdef int n_logprobs
    try:
        n_logprobs = int_argument(logprobs, "logprobs", 0, INT32_MAX)
        if n_logprobs:
            generation.keep_logits()
        generation.start()
    except BaseException:
        generation.close()
        raise
    return TokenStream(model, generation, n_logprobs)


cdef list read_stops(object stop):
    if isinstance(stop, (bytes, bytearray)) or not (stop is None or hasattr(stop, "__iter__")):
        raise TypeError(f"stop is {type(stop).__name__}, expected a str or a sequence of str")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else list(stop)
    for text in stops:
        if not isinstance(text, str):
            raise TypeError(f"stop holds a {type(text).__name__}, expected str")
        if not text:
            raise ValueError("stop holds an empty string, expected at least one character")
    return stops
