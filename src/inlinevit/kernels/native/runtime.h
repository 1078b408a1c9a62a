// Threads and scratch memory; compiled once, for any CPU.
#pragma once
#include <stddef.h>

namespace inlinevit {

using Task = void (*)(void* context, long index);

// Call task(context, index) for all 0 <= index < count on up to `threads` threads, and return when all have ended.
// Throws std::bad_alloc if a task did.
void run_tasks(long count, long threads, Task task, void* context);

// Function GOMP_parallel of an OpenMP runtime: calls function(data) on `threads` threads.
using OpenMP = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);
// Run tasks on the threads of this runtime from now on, or with null on threads of this library.
void use_openmp(OpenMP parallel);

enum class Scratch { caller, task, count };

// Memory of the current thread, 64-byte aligned, valid until the same thread asks for the same kind again.
// Uninitialised. A function that starts tasks uses `caller`, the tasks use `task`: the first thread does both.
void* scratch(Scratch kind, size_t bytes);

// Free what a call has left in the caller's scratch if it is large; the rest is reused by the next call.
void trim_scratch();

}  // namespace inlinevit
