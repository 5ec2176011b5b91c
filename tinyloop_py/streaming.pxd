from .generation cimport Generation
from .loaded_model cimport LoadedModel


cdef object start_stream(LoadedModel model, Generation generation, object logprobs)
