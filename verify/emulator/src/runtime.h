// runtime.h: what the parts of the emulator see of each other.
//
// A CUDA thread is a fiber (fiber.cpp). Blocks run one after the other, all in one thread of the operating system, so
// nothing here needs a lock. A fiber runs until it must wait; whoever ends the wait calls wake().
//
// Happens-before is kept by vector clocks with one entry per component: every thread, the wgmma agent of every warp,
// and, from when they are first used, every mbarrier (its bulk loads) and every thread's bulk-store agent. An access is
// (component, time). A thread knows of it iff thread.clocks.order[component] >= time.
//
// Always holds:
//   A thread's own time advances at each release and each fence, and only there: so one of these ends one epoch.
//   Entries of components that do not exist yet are 0 in every clock.
//   A twin called from emitted code has its call site as hidden last argument; findings name that line.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../include/cuda_runtime.h"  // dim3, uint3, emu::Site, emu::Body

namespace emu {

constexpr int kMaxThreads = 1024, kMaxWarps = kMaxThreads / 32;
constexpr int kMaxMbarriers = 64;
constexpr uint32_t kSharedBase = 0x400;          // first address of dynamic shared memory, as on the hardware
constexpr uint32_t kSharedLimit = 227 * 1024;    // most bytes of a block
constexpr uint32_t kFullMask = 0xffffffffu;

// ---- Configuration and options (launch.cpp)

enum class Timing { late, early, random };         // when an asynchronous operation is performed
enum class Order { ascending, descending, random };  // which thread runs next

struct Config {
  Timing timing = Timing::late;
  Order order = Order::ascending;
  bool check = true;     // races, initialisation, proxies, bank conflicts
  bool collect = false;  // go on after a finding that allows it
  uint64_t seed = 0;
};
extern Config config;

double option(const char* name, double otherwise);  // as set by emu_option; look it up at launch_start, not per access

uint32_t random_bits();            // the run's generator
bool chance(unsigned one_in);      // true once in `one_in` draws
bool perform_now();                // EARLY: true, LATE: false, RANDOM: a draw. For an operation at its issue.

// ---- Vector clocks (clock.cpp)

struct Clocks {
  uint32_t* order = nullptr;      // what happened before
  uint32_t* fenced = nullptr;     // what of it a fence.proxy.async made visible to the asynchronous proxy
  uint32_t* published = nullptr;  // what of it a __threadfence made visible to other blocks
};

enum class Agent { thread, wgmma, mbarrier, bulk_store };
int thread_component(int thread);
int wgmma_component(int warp);
int new_component(Agent agent, int index);  // mbarrier (index: its address) or bulk_store (index: thread)
std::string component_name(int component);  // for sentences: "thread 5", "wgmma of warp 2", ...

Clocks new_clocks();  // all zero; lives until the block ends
void clear(Clocks clocks);
void copy(Clocks into, Clocks from);
void join(Clocks into, Clocks from);  // entry by entry the larger one

// ---- Threads, warps, scheduling (fiber.cpp)

// Why a thread cannot run. `describe` gives the state of the thing waited for, for the deadlock report; may be null.
// `hopeless`, null for never: whatever the others did, this wait would not end. Such a wait is the first to report.
struct Wait {
  const char* what = nullptr;  // "__syncthreads", "mbarrier.try_wait"
  Site site;
  uint32_t object = 0, detail = 0;  // such as barrier id, parity: threads that differ in them are reported apart
  std::string (*describe)(const Wait&) = nullptr;
  bool (*hopeless)(const Wait&) = nullptr;
};

struct Thread {
  uint3 index;  // threadIdx
  int linear = 0, warp = 0, lane = 0;
  bool done = false;
  Clocks clocks;
  Wait wait;
  uint32_t now() const { return clocks.order[linear]; }  // its own time: an ordinary access is (linear, now())
};

struct Warp {
  int id = 0;
  uint32_t alive = 0;  // lanes that have not exited
  uint32_t ready = 0;  // lanes that can run
  bool minimum_is_current = false;
};

extern Thread* self;  // the running thread; null outside of a block
extern int thread_count, warp_count;
Thread& thread_at(int linear);
Warp& warp_at(int warp);
inline Warp& own_warp() { return warp_at(self->warp); }
inline Thread& lane_of(const Warp& warp, int lane) { return thread_at(32 * warp.id + lane); }

void block_on(const Wait& wait);  // the running thread waits; returns after some wake(thread)
void wake(Thread& thread);
void yield();        // lets another thread run, the caller stays ready (a spurious time-out)
void polled(Site site);  // at what a thread may do in a loop until another block acts: such a loop never ends
void yield_point();  // under Order::random it yields now and then; call before shared accesses and barrier operations
[[noreturn]] void abandon_block();  // to the main context; the fibers are dropped, not unwound
int living_threads();                // of the block, that have not exited
bool at_barrier(const Thread& thread);  // it waits in a __syncthreads or bar.sync (barrier.cpp)
// For launch.cpp: make the fibers of a block (false: no memory for their stacks); run them until all have exited.
bool start_threads(dim3 block);
void run_threads(Body body);

// Edges of happens-before; all do nothing when config.check is off.
void release(Thread& thread, Clocks into);                 // `into` joins the thread's clocks; its own time advances
void acquire(Thread& thread, Clocks from);                 // the thread's clocks join `from`
void learn(Thread& thread, int component, uint32_t time);  // e.g. after wgmma.wait_group: the agent's reads are done
void fence_proxy(Thread& thread);                          // fence.proxy.async: fenced = order
void fence_device(Thread& thread);                         // __threadfence: published = order
Clocks warp_minimum(Warp& warp);  // entry by entry the least of the living lanes: what the whole warp knows. Cached.

// ---- Warp exchange (collective.cpp)

// Called once, by the last lane to arrive; operands[lane] is what that lane passed, null for lanes not in `mask`.
using WarpAction = void (*)(Warp& warp, void* const* operands, uint32_t mask);
// All lanes of `mask` meet here. They must come from one site with the same `what`, else: divergent-collective.
void collective(const char* what, uint32_t mask, void* operands, WarpAction action, Site site);

// The same for the 4 warps of a warpgroup (warps 4g .. 4g + 3): operands[128], in the order of the threads. Adds no
// edge of happens-before. All 128 threads must be alive.
using WarpgroupAction = void (*)(int first_warp, void* const* operands);
void warpgroup_collective(const char* what, void* operands, WarpgroupAction action, Site site);

// ---- Arithmetic of the matrix units (arithmetic.cpp)

// d (16 x n) += a (16 x 16) b (16 x n), row-major, n a multiple of 8. Option "mma": 0 float32, k ascending; 1 exact
// sum, rounded once; 2 products aligned to the largest exponent and truncated, as the hardware does.
void accumulate_16(float* d, const float* a, const float* b, int n);
uint32_t to_bf16(float x);  // rounded to nearest even
uint32_t to_f16(float x);
inline float from_bf16(uint32_t bits) {
  uint32_t wide = bits << 16;
  float value;
  __builtin_memcpy(&value, &wide, 4);
  return value;
}
inline float from_f16(uint32_t bits) {
  uint32_t wide = (bits & 0x7fff) << 13;
  if ((bits & 0x7c00) == 0x7c00) wide |= 0x7f800000;  // infinity or NaN
  float value;
  __builtin_memcpy(&value, &wide, 4);
  if ((wide & 0x7f800000) != 0x7f800000) value *= 0x1p112f;  // the exponent's bias: 127 - 15
  return bits & 0x8000 ? -value : value;
}

// ---- Shared memory and its shadow (shadow.cpp)

// An access: what stands in the sentence, what the accessor knows, and as whose access at which time it is recorded.
struct Access {
  const char* what;  // "ldmatrix", "wgmma", "TMA load"
  Site site;
  const Thread* thread;      // named in findings
  const uint32_t* order;     // must cover the earlier accesses
  const uint32_t* fenced;    // asynchronous proxy: must cover earlier writes of threads. Null for the generic proxy
  int component;
  uint32_t time;
};
inline Access generic_access(const char* what, Site site, const Thread& thread) {
  return {what, site, &thread, thread.clocks.order, nullptr, thread.linear, config.check ? thread.now() : 0};
}
constexpr uint32_t kInFlight = 0xffffffffu;  // time of a write that nobody may rely on yet

extern uint32_t shared_size;  // bytes of the block
unsigned char* shared_at(uint32_t address);
// Stops the block unless [address, address + bytes) lies in the block's shared memory and the address is aligned.
void check_shared(uint32_t address, uint32_t bytes, uint32_t alignment, const char* what, Site site,
                  const Thread& thread);
// Checks and records; moves no data. Granularity: 4 bytes. Call check_shared before.
void shared_read(uint32_t address, uint32_t bytes, const Access& access);
void shared_write(uint32_t address, uint32_t bytes, const Access& access);
// What `component` wrote with time kInFlight is now its ordinary write of `time`.
void shared_landed(uint32_t address, uint32_t bytes, int component, uint32_t time);
void shared_poison(uint32_t address, uint32_t bytes);  // 0xff: NaN in every format. Of a destination at issue.

// ---- Global memory (memory.cpp). Each stops the block unless the range lies in one registered tensor.

// They count and check; the caller moves the data. An atomic update calls both.
enum class Atomic { no, yes };
enum class Landing { now, later };  // later: nobody may rely on the write before global_landed, by the same thread
void global_read(const void* address, size_t bytes, size_t alignment, const char* what, Site site,
                 Atomic atomic = Atomic::no);
void global_write(const void* address, size_t bytes, size_t alignment, const char* what, Site site,
                  Atomic atomic = Atomic::no, Landing landing = Landing::now);
void global_landed(const void* address, size_t bytes);

// ---- Order between accesses to global memory, in one block and between blocks (blocks.cpp)

struct GlobalAccess {
  uint32_t launch = 0;  // 0: there was none
  uint32_t block = 0;   // rank in the launch
  uint32_t time = 0;    // of the thread in that block, or kInFlight
  uint16_t thread = 0, site = 0;
};
GlobalAccess global_access(Site site);               // of the running thread, now
bool is_of_this_block(const GlobalAccess& access);
bool knows_of(const GlobalAccess& earlier);          // it happened before what the running thread does now
void atomic_passes_knowledge(const void* address);   // at an atomic update of counters and semaphores

// ---- Bank conflicts (bank.cpp)

enum class BankUse { ldmatrix, stmatrix, ld, st, cp_async };
void count_matrix_rows(BankUse use, const uint32_t* rows);  // 8 row addresses of one 8 x 8 matrix: one phase
void log_access(BankUse use, uint32_t address, uint32_t bytes, Site site);  // of the running lane
void converged(Warp& warp);  // lanes are together again: zips their logs. Called by every collective and barrier.

// ---- Counters (report.cpp)

struct Counters {
  uint64_t switches, mma, wgmma, tma, barriers;
  uint64_t phases[5], wavefronts[5];  // by BankUse
  double seconds;
};
extern Counters counters;

// ---- Findings (report.cpp)

// Sentence: "file.cu:12: " and what printf makes of the rest: say who, what, where, and why it is wrong. `other` is the
// second line, of a race for example; {} if there is none. finding() returns only under config.collect.
[[gnu::format(printf, 5, 6)]] void finding(const char* kind, Site at, Site other, const Thread* thread,
                                           const char* format, ...);
// For what leaves nothing to go on with; inside a block it does not return.
[[gnu::format(printf, 5, 6)]] void fatal(const char* kind, Site at, Site other, const Thread* thread,
                                         const char* format, ...);
bool stopped();                             // a finding ended the run
std::string name(const Thread& thread);     // "thread 37"
std::string place(Site site);               // "file.cu:12", and in Python's eyes the calls around it
std::string shared_name(uint32_t address);  // "shared memory +0x40"
uint16_t site_id(Site site);                // small numbers for shadow records
Site site_of(uint16_t id);

// ---- Topics (topics.cpp lists them)

// Hooks of one topic; null where it has none.
struct Topic {
  void (*launch_start)();        // options are read here
  void (*block_start)();         // before the first thread runs: forget the last block
  void (*thread_exit)(Thread&);  // by the thread itself, while it is still alive
  void (*thread_left)(Thread&);  // by the thread itself, when it no longer counts: others may now be complete
  void (*block_exit)();          // after the last thread; self is null
  bool (*progress)();            // no thread can run (or, Timing::random, a draw): complete something; true if it did
};
extern const Topic* const topics[];
extern const int topic_count;

namespace clock_topic { extern const Topic topic; }
namespace arithmetic { extern const Topic topic; }
namespace collective_topic { extern const Topic topic; }
namespace barrier { extern const Topic topic; }
namespace cp_async { extern const Topic topic; }
namespace shadow { extern const Topic topic; }
namespace bank { extern const Topic topic; }
namespace blocks { extern const Topic topic; }

}  // namespace emu

// ---- For Python, by ctypes (launch.cpp, report.cpp, memory.cpp)
extern "C" {
// Also forgets findings and counters, which otherwise add up over launches. After a finding launches fail until then.
void emu_configure(int timing, int order, int check, int collect, uint64_t seed);
void emu_option(const char* name, double value);
void emu_reset();  // forgets findings and counters only
// Written-once counts from here on: a tensor that is launched into again must be registered again.
void emu_register(void* base, size_t bytes, int writable, int once, const char* name);
void emu_unregister_all();
// Rows base + sum(i_k * strides_bytes[k]), 0 <= i_k < sizes[k], of row_bytes each, must be written, and nothing else of
// the tensor. Without any call for a `once` tensor: all of it.
void emu_expect_written(void* base, size_t row_bytes, const int64_t* sizes, const int64_t* strides_bytes, int dims);
int emu_check_outputs();  // adds findings for what was not written; their number
int emu_findings(char* json, size_t n);  // number of findings; JSON array, truncated to n bytes with the closing 0
size_t emu_findings_bytes();             // bytes that emu_findings needs
int emu_counters(char* json, size_t n);  // bytes needed
}
