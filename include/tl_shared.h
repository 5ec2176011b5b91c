/* How a function is marked that runs on the host and on devices alike. */
#ifndef TINYLOOP_SHARED_H
#define TINYLOOP_SHARED_H

#if defined(__CUDACC__)
#define TL_SHARED static __host__ __device__ __forceinline__
#else
#define TL_SHARED static inline __attribute__((always_inline))
#endif

#endif /* TINYLOOP_SHARED_H */
