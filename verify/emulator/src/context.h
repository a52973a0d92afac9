// context.h: stacks, and the switch from one to another.
//
// A context is a suspended point of execution. Switching saves what a function call must preserve and nothing else;
// the floating-point control words stay as they are, they belong to the thread of the operating system.
#pragma once
#include <cstddef>

#if !defined(EMU_CONTEXT_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define EMU_CONTEXT_UCONTEXT 1
#endif
#ifdef EMU_CONTEXT_UCONTEXT
#include <ucontext.h>
#endif

namespace emu {

struct Context {
#ifdef EMU_CONTEXT_UCONTEXT
  ucontext_t state;
#else
  void* stack_pointer = nullptr;
#endif
};

// A stack of stack_bytes() bytes above a page that faults. Null where the system has no memory left.
char* new_stack();
size_t stack_bytes();

// The next switch to `context` calls `entry`, which must not return, on `stack`, `offset` bytes (of 64) below its top.
void prepare(Context& context, char* stack, size_t offset, void (*entry)());

// Suspends the caller into `from` and resumes `to`.
void switch_context(Context& from, Context& to);

}  // namespace emu
