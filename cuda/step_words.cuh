// Flagged words: eight bytes that one CTA hands to another in a step as one kernel, stored and loaded together with the flag that tells which
// they are.
#pragma once

#include "device.cuh"

namespace tl {

#if !defined(TL_EMULATOR)

struct Flagged {
  uint64_t data, flag;
};
TL_DEVICE void store_flagged(void *to, uint64_t data, uint64_t flag) {
  asm volatile("{\n.reg .b128 w;\nmov.b128 w, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], w;\n}" ::"l"(to), "l"(data), "l"(flag) : "memory");
}
TL_DEVICE Flagged load_flagged(const void *from) {
  Flagged w;
  asm volatile("{\n.reg .b128 w;\nld.relaxed.gpu.global.b128 w, [%2];\nmov.b128 {%0, %1}, w;\n}" : "=l"(w.data), "=l"(w.flag) : "l"(from) : "memory");
  return w;
}
// Where it is wanted; a branch would cost more than the load's instructions.
TL_DEVICE void load_flagged_if(Flagged &w, bool wanted, const void *from) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      ".reg .b128 w;\n"
      "setp.ne.u32 wanted, %3, 0;\n"
      "mov.b128 w, {%0, %1};\n"
      "@wanted ld.relaxed.gpu.global.b128 w, [%2];\n"
      "mov.b128 {%0, %1}, w;\n"
      "}"
      : "+l"(w.data), "+l"(w.flag)
      : "l"(from), "r"((uint32_t)wanted)
      : "memory");
}
// The first `count` of n words, word i from at(i): asked for; and then, once all have the flag, there. The rest are 0. (What is set on some
// paths only would be live, in a register, ever since the kernel began.)
template <int n, class At>
TL_DEVICE void ask_words(Flagged (&w)[n], int count, const At &at) {
#pragma unroll
  for (int i = 0; i < n; i++) {
    w[i] = {0, 0};
    load_flagged_if(w[i], i < count, at(i));
  }
}
template <int n>
TL_DEVICE bool are_missing(const Flagged (&w)[n], int count, uint64_t flag) {
  bool missing = false;
#pragma unroll
  for (int i = 0; i < n; i++) missing |= i < count && w[i].flag != flag;
  return missing;
}
// By whole warps. While one is missing all are asked for again: were it those alone, each would wait for the one before, as the compiler copies
// their flags; and were it those lanes alone, they would stay apart from the others up to the next exchange between them.
template <int n, class At>
TL_DEVICE void await_words(uint64_t (&data)[n], Flagged (&w)[n], int count, uint64_t flag, const At &at) {
  while (__any_sync(0xffffffffu, are_missing(w, count, flag))) ask_words(w, count, at);
#pragma unroll
  for (int i = 0; i < n; i++) data[i] = w[i].data;
}
template <int n, class At>
TL_DEVICE void await_words(uint64_t (&data)[n], int count, uint64_t flag, const At &at) {
  Flagged w[n];
  ask_words(w, count, at);
  await_words(data, w, count, flag, at);
}
// The same of one word by a thread alone.
TL_DEVICE uint64_t await_word(const void *from, uint64_t flag) {
  Flagged w;
  do w = load_flagged(from);
  while (w.flag != flag);
  return w.data;
}

// Has a value worked out here. The compiler would put it off until it is needed, behind what is waited for in between.
template <class T>
TL_DEVICE void work_out(T &x) {
  asm volatile("" : "+r"(x));
}

// threadIdx.x, of which the compiler does not know that it is always the same: what it works out from it in a loop stays there.
TL_DEVICE int thread_now() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t & 1023;  // not negative: divisions are shifts
}

#endif

}  // namespace tl
