// wgmma.cpp: asynchronous matrix products of a warpgroup: operand descriptors, accumulators in flight, groups.
//
// Each warp w computes its own 16 of the 64 rows, in its own time; that all four warps of the warpgroup issue the same
// products is checked. From its first product to the wait that completes its last, an accumulator is held here and the
// registers have a NaN pattern, which must be intact at the wait.
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": register fragments, "Shared Memory Matrix
// Layout" with its canonical layouts, matrix descriptor format, wgmma.fence, wgmma.commit_group, wgmma.wait_group.
//
// Always holds: an operand in shared memory is recorded, at the issue, as read by the warp's wgmma agent in the group
// then open, and must be known to every lane of the warp. Groups complete in order.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>

#include "emu_ptx_sm90a.h"
#include "hopper.h"
#include "tensor_map.h"

namespace emu {
namespace wgmma {
namespace {

constexpr int kLargestN = 256;

// ---- Operands in shared memory

struct Descriptor {
  uint32_t start, leading, stride;  // bytes
  Swizzle swizzle;
};

Descriptor decode_descriptor(uint64_t bits) {
  constexpr Swizzle modes[4] = {Swizzle::none, Swizzle::span128, Swizzle::span64, Swizzle::span32};
  return {static_cast<uint32_t>(bits & 0x3fff) << 4, static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4,
          static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4, modes[bits >> 62]};
}
constexpr uint64_t kBaseOffset = uint64_t(7) << 49;
constexpr uint64_t kUnusedBits =
    ~(uint64_t(0x3fff) | uint64_t(0x3fff) << 16 | uint64_t(0x3fff) << 32 | kBaseOffset | uint64_t(3) << 62);

// The address of the 16-byte chunk with the elements (line, 8 chunk) .. (line, 8 chunk + 7) of an operand.
// K-major: a line is a row (of A) or column (of B), its 16 elements along K are two chunks.
// MN-major: a line is one of the 16 steps along K, its chunks run along M or N.
uint32_t chunk_address(const Descriptor& d, bool mn_major, uint32_t line, uint32_t chunk) {
  const uint32_t span = swizzle_span(d.swizzle), chunks = span / 16;  // of a row of the swizzle pattern
  uint32_t address = d.start + line % 8 * span;
  if (!mn_major) {
    address += line / 8 * d.stride + (d.swizzle == Swizzle::none ? chunk * d.leading : chunk * 16);
  } else if (d.swizzle == Swizzle::none) {
    address += line / 8 * d.leading + chunk * d.stride;
  } else {
    address += line / 8 * d.stride + chunk / chunks * d.leading + chunk % chunks * 16;
  }
  return swizzled(address, d.swizzle);
}

// An operand of `extent` rows of A or columns of B, from `first` on; 16 elements along K.
struct Operand {
  Descriptor descriptor;
  bool mn_major;
  uint32_t first, extent;

  uint32_t lines() const { return mn_major ? 16 : extent; }
  uint32_t chunks() const { return mn_major ? extent / 8 : 2; }
  uint32_t address(uint32_t line, uint32_t chunk) const {
    return mn_major ? chunk_address(descriptor, true, line, first / 8 + chunk)
                    : chunk_address(descriptor, false, first + line, chunk);
  }

  // Calls use(line, chunk, pointer to its 8 elements).
  template <class Use>
  void for_each_chunk(Use use) const {
    for (uint32_t line = 0; line < lines(); ++line) {
      for (uint32_t chunk = 0; chunk < chunks(); ++chunk) {
        uint16_t elements[8];
        std::memcpy(elements, shared_at(address(line, chunk)), sizeof elements);
        use(line, chunk, elements);
      }
    }
  }
};

void record_read(const Operand& operand, const Access& access) {
  for (uint32_t line = 0; line < operand.lines(); ++line) {
    for (uint32_t chunk = 0; chunk < operand.chunks();) {
      // Chunks that a swizzle exchanges among themselves are checked as one range: pairs, fours, eights.
      const uint32_t address = operand.address(line, chunk);
      uint32_t together = 1;
      for (uint32_t n = 2; n <= operand.chunks() - chunk && n <= 8; n *= 2) {
        const uint32_t base = address & ~(16 * n - 1);
        bool same = true;
        for (uint32_t i = together; i < n && same; ++i) {
          same = (operand.address(line, chunk + i) & ~(16 * n - 1)) == base;
        }
        if (!same) break;
        together = n;
      }
      const uint32_t from = address & ~(16 * together - 1);
      check_shared(from, 16 * together, 16, access.what, access.site, *access.thread);
      shared_read(from, 16 * together, access);
      chunk += together;
    }
  }
}

// ---- Accumulators and products

// What the registers of an accumulator hold while it is in flight: a NaN, another one in each register.
uint32_t in_flight(int index) { return 0x7fe1a000u + static_cast<uint32_t>(index); }

struct Accumulator {
  std::array<float*, 32> registers;  // of each lane
  int n = 0;
  int products = 0;  // in flight
  alignas(32) float tile[16 * kLargestN];

  // Register 4 j + 2 h + e of lane 4 g + t is the element (g + 8 h, 8 j + 2 t + e).
  template <class Use>
  void for_each_register(Use use) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < n / 2; ++i) {
        const int row = lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        use(lane, i, tile[row * n + column]);
      }
    }
  }
};

struct Product {
  Accumulator* accumulator;
  Operand a, b;
  bool a_in_registers, f16, accumulate, done;
  Site site;
  alignas(32) float a_tile[16 * 16];
};

// What all four warps of a warpgroup must agree on.
struct Issue {
  Site site;
  uint64_t a, b;
  int n;
};

struct State {
  bool fenced = false;
  std::vector<std::unique_ptr<Product>> open;
  std::deque<std::vector<std::unique_ptr<Product>>> committed;
  uint32_t completed = 0;  // groups
  std::vector<std::unique_ptr<Accumulator>> accumulators;
  size_t issued = 0;
  uint32_t next_time() const { return completed + static_cast<uint32_t>(committed.size()) + 1; }
};

State states[kMaxWarps];
std::vector<Issue> issues[kMaxWarps / 4];

float element(uint32_t bits, bool f16) { return f16 ? from_f16(bits) : from_bf16(bits); }

void perform(Product& product) {
  if (product.done) return;
  product.done = true;
  Accumulator& accumulator = *product.accumulator;
  const int n = accumulator.n;
  alignas(32) static float b_tile[16 * kLargestN];
  if (!product.a_in_registers) {
    product.a.for_each_chunk([&](uint32_t line, uint32_t chunk, const uint16_t* elements) {
      for (uint32_t e = 0; e < 8; ++e) {
        const uint32_t row = product.a.mn_major ? 8 * chunk + e : line, k = product.a.mn_major ? line : 8 * chunk + e;
        product.a_tile[16 * row + k] = element(elements[e], product.f16);
      }
    });
  }
  product.b.for_each_chunk([&](uint32_t line, uint32_t chunk, const uint16_t* elements) {
    for (uint32_t e = 0; e < 8; ++e) {
      const uint32_t k = product.b.mn_major ? line : 8 * chunk + e, column = product.b.mn_major ? 8 * chunk + e : line;
      b_tile[k * static_cast<uint32_t>(n) + column] = element(elements[e], product.f16);
    }
  });
  if (!product.accumulate) std::memset(accumulator.tile, 0, sizeof(float) * 16 * static_cast<size_t>(n));
  accumulate_16(accumulator.tile, product.a_tile, b_tile, n);
}

// Products are performed in order: the next one may be performed now only if no earlier one is left.
bool all_done(const State& state) {
  const auto done = [](const std::unique_ptr<Product>& product) { return product->done; };
  const auto group_done = [&](const auto& group) { return std::all_of(group.begin(), group.end(), done); };
  return group_done(state.open) && std::all_of(state.committed.begin(), state.committed.end(), group_done);
}

// The accumulator of these registers; taken into flight if it is not yet.
Accumulator& take(State& state, const std::array<float*, 32>& registers, int n, Site site, const Thread& thread) {
  for (auto& held : state.accumulators) {
    if (held->registers == registers && held->n == n) return *held;
    const bool apart = registers[0] + n / 2 <= held->registers[0] || held->registers[0] + held->n / 2 <= registers[0];
    if (!apart) {
      fatal("accumulator", site, {}, &thread,
            "the accumulator of %s overlaps registers of another accumulator that is in flight", name(thread).c_str());
    }
  }
  state.accumulators.emplace_back(new Accumulator);  // not make_unique, which would clear the tile
  Accumulator& taken = *state.accumulators.back();
  taken.registers = registers;
  taken.n = n;
  taken.for_each_register([&](int lane, int i, float& value) {
    value = registers[static_cast<size_t>(lane)][i];
    const uint32_t pattern = in_flight(i);
    std::memcpy(&registers[static_cast<size_t>(lane)][i], &pattern, sizeof pattern);
  });
  return taken;
}

// Gives the results to the registers, which must not have been touched.
void give_back(Accumulator& accumulator, const Warp& warp, Site site) {
  bool reported = false;
  accumulator.for_each_register([&](int lane, int i, float& value) {
    float& place = accumulator.registers[static_cast<size_t>(lane)][i];
    uint32_t bits;
    std::memcpy(&bits, &place, sizeof bits);
    if (bits != in_flight(i) && !reported) {
      reported = true;
      const Thread& thread = lane_of(warp, lane);
      finding("accumulator-touched", site, {}, &thread,
              "accumulator touched in flight: %s wrote register %d of an accumulator before the wgmma.wait_group at "
              "this line",
              name(thread).c_str(), i);
    }
    place = value;
  });
}

// ---- Warp actions

struct ProductOperands {
  float* d;
  const uint32_t* a_registers;
  uint64_t a, b;
  int n;
  bool trans_a, trans_b, f16, accumulate;
  Site site;
};

Operand checked_operand(uint64_t bits, bool mn_major, uint32_t first, int extent, const char* which, Site site,
                        const Thread& thread) {
  if (bits & kUnusedBits) {
    fatal("wgmma-descriptor", site, {}, &thread, "the descriptor of %s of %s has bits outside of its fields: %016llx",
          which, name(thread).c_str(), static_cast<unsigned long long>(bits));
  }
  if (bits & kBaseOffset) {
    fatal("wgmma-descriptor", site, {}, &thread,
          "the descriptor of %s of %s has a base offset: tiles must start where the swizzle pattern does", which,
          name(thread).c_str());
  }
  return {decode_descriptor(bits), mn_major, first, static_cast<uint32_t>(extent)};
}

void check_agreement(const Warp& warp, const Issue& issue, const Thread& thread) {
  std::vector<Issue>& log = issues[warp.id / 4];
  const size_t index = states[warp.id].issued++;
  if (index == log.size()) {
    log.push_back(issue);
    return;
  }
  const Issue& first = log[index];
  if (first.a == issue.a && first.b == issue.b && first.n == issue.n && first.site.line == issue.site.line) return;
  fatal("divergent-warpgroup", issue.site, first.site, &thread,
        "wgmma number %zu of warp %d has another descriptor or shape than that of another warp of its warpgroup, at "
        "line %d",
        index, warp.id, first.site.line);
}

void product_action(Warp& warp, void* const* operands, uint32_t) {
  State& state = states[warp.id];
  const auto& first = *static_cast<const ProductOperands*>(operands[0]);
  const Thread& thread = lane_of(warp, 0);
  ++counters.wgmma;
  if (!state.fenced && config.check) {
    finding("no-wgmma-fence", first.site, {}, &thread,
            "wgmma by warp %d with no wgmma.fence since its registers could last be written", warp.id);
  }
  std::array<float*, 32> registers;
  for (size_t lane = 0; lane < 32; ++lane) {
    const auto& given = *static_cast<const ProductOperands*>(operands[lane]);
    registers[lane] = given.d;
    if (given.a != first.a || given.b != first.b || given.accumulate != first.accumulate) {
      const Thread& other = lane_of(warp, static_cast<int>(lane));
      fatal("divergent-collective", first.site, {}, &other,
            "%s gives wgmma another descriptor or scale-d than %s: they must be the same in the whole warpgroup",
            name(other).c_str(), name(thread).c_str());
    }
  }
  check_agreement(warp, {first.site, first.a, first.b, first.n}, thread);

  auto product = std::make_unique<Product>();
  product->a_in_registers = first.a_registers != nullptr;
  product->f16 = first.f16;
  product->accumulate = first.accumulate;
  product->done = false;
  product->site = first.site;
  const Clocks known = config.check ? warp_minimum(warp) : Clocks();
  const Access access{"wgmma",          first.site, &thread, known.order, known.fenced, wgmma_component(warp.id),
                      state.next_time()};
  product->b = checked_operand(first.b, first.trans_b, 0, first.n, "B", first.site, thread);
  record_read(product->b, access);
  if (product->a_in_registers) {
    // a[r] of lane 4 g + t: the elements (g + 8 (r % 2), 8 (r / 2) + 2 t) and the next one.
    for (int lane = 0; lane < 32; ++lane) {
      const uint32_t* a = static_cast<const ProductOperands*>(operands[lane])->a_registers;
      for (int r = 0; r < 4; ++r) {
        float* place = product->a_tile + 16 * (lane / 4 + 8 * (r % 2)) + 8 * (r / 2) + 2 * (lane % 4);
        place[0] = element(a[r] & 0xffff, first.f16);
        place[1] = element(a[r] >> 16, first.f16);
      }
    }
  } else {
    const uint32_t rows = static_cast<uint32_t>(warp.id % 4) * 16;
    product->a = checked_operand(first.a, first.trans_a, rows, 16, "A", first.site, thread);
    record_read(product->a, access);
  }
  product->accumulator = &take(state, registers, first.n, first.site, thread);
  ++product->accumulator->products;
  if (all_done(state) && perform_now()) perform(*product);
  state.open.push_back(std::move(product));
}

void fence_action(Warp& warp, void* const*, uint32_t) { states[warp.id].fenced = true; }

void commit_action(Warp& warp, void* const*, uint32_t) {
  State& state = states[warp.id];
  state.committed.push_back(std::move(state.open));
  state.open.clear();
}

struct WaitOperands {
  int newest;
  Site site;
};

void wait_action(Warp& warp, void* const* operands, uint32_t) {
  const auto& wait = *static_cast<const WaitOperands*>(operands[0]);
  State& state = states[warp.id];
  while (state.committed.size() > static_cast<size_t>(wait.newest)) {
    for (auto& product : state.committed.front()) {
      perform(*product);
      --product->accumulator->products;
    }
    state.committed.pop_front();
    ++state.completed;
  }
  state.fenced = false;
  for (auto& accumulator : state.accumulators) {
    if (!accumulator->products) give_back(*accumulator, warp, wait.site);
  }
  state.accumulators.erase(std::remove_if(state.accumulators.begin(), state.accumulators.end(),
                                          [](const auto& accumulator) { return !accumulator->products; }),
                           state.accumulators.end());
  for (int lane = 0; lane < 32; ++lane) learn(lane_of(warp, lane), wgmma_component(warp.id), state.completed);
}

// ---- Hooks

void block_start() {
  for (int warp = 0; warp < warp_count; ++warp) states[warp] = State();
  for (auto& log : issues) log.clear();
}

void thread_exit(Thread& thread) {
  State& state = states[thread.warp];
  const Product* left = state.open.empty() ? nullptr : state.open.front().get();
  for (const auto& group : state.committed) {
    if (!group.empty() && !left) left = group.front().get();
  }
  if (!left) return;
  const Site site = left->site;
  state = State();
  finding("exit-in-flight", site, {}, &thread, "%s exits with this wgmma in flight: no wgmma.wait_group completed it",
          name(thread).c_str());
}

void block_exit() {
  for (int warp = 0; warp < warp_count; ++warp) {
    const std::vector<Issue>& log = issues[warp / 4];
    if (states[warp].issued == log.size()) continue;
    const Site site = log[states[warp].issued].site;
    finding("divergent-warpgroup", site, {}, &thread_at(32 * warp),
            "warp %d executed %zu wgmma instructions and another warp of its warpgroup %zu, the next of them here",
            warp, states[warp].issued, log.size());
    return;
  }
}

}  // namespace

const Topic topic = {nullptr, block_start, thread_exit, nullptr, block_exit, nullptr};

}  // namespace wgmma

void wgmma_fence(Site site) { collective("wgmma.fence", kFullMask, nullptr, wgmma::fence_action, site); }

void wgmma_commit(Site site) { collective("wgmma.commit_group", kFullMask, nullptr, wgmma::commit_action, site); }

void wgmma_wait(int newest, Site site) {
  wgmma::WaitOperands operands{newest, site};
  collective("wgmma.wait_group", kFullMask, &operands, wgmma::wait_action, site);
}

void wgmma_product(float* d, int n, const uint32_t* a_registers, uint64_t a, uint64_t b, bool trans_a, bool trans_b,
                   bool f16, bool accumulate, Site site) {
  yield_point();
  wgmma::ProductOperands operands{d, a_registers, a, b, n, trans_a, trans_b, f16, accumulate, site};
  collective("wgmma.mma_async", kFullMask, &operands, wgmma::product_action, site);
}

}  // namespace emu
