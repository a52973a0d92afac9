// bank.cpp: bank conflicts of shared-memory accesses, as wavefronts per phase: 1.00 is free of conflicts.
//
// Shared memory has 32 banks of 4 bytes. One access of a warp runs in phases: 8 rows of one ldmatrix matrix, or 32
// lanes with 4 bytes, 16 with 8, 8 with 16. A phase takes as many wavefronts as the most loaded bank has different
// words. Which scalar accesses of the lanes belong together is known when the lanes meet again: the k-th of each lane
// from the same line. For cp.async the same rule is applied to its writes.
// Source: CUDA C++ Programming Guide, "Shared Memory" of compute capability 5.x and later.
#include <algorithm>
#include <cstring>
#include <tuple>

#include "runtime.h"

namespace emu {
namespace {

struct Entry {
  uint32_t address;
  uint16_t site;
  uint8_t bytes;
  BankUse use;
};
std::vector<Entry> logs[kMaxThreads];
bool has_log[kMaxWarps];

void block_start() {
  for (int i = 0; i < thread_count; ++i) logs[i].clear();
  for (int i = 0; i < warp_count; ++i) has_log[i] = false;
}

void count_phase(BankUse use, uint32_t* words, int count) {
  std::sort(words, words + count);
  count = int(std::unique(words, words + count) - words);
  int load[32] = {}, most = 0;
  for (int i = 0; i < count; ++i) most = std::max(most, ++load[words[i] % 32]);
  ++counters.phases[int(use)];
  counters.wavefronts[int(use)] += most;
}

// One access of the warp: entries[lane], null for lanes that do not take part.
void count_access(const Entry* const* entries) {
  const Entry* any = nullptr;
  for (int lane = 0; !any; ++lane) any = entries[lane];
  const int lanes = any->bytes == 16 ? 8 : any->bytes == 8 ? 16 : 32;
  for (int first = 0; first < 32; first += lanes) {
    uint32_t words[32];
    int count = 0;
    for (int lane = first; lane < first + lanes; ++lane)
      if (entries[lane])
        for (int i = 0; i < std::max(any->bytes / 4, 1); ++i) words[count++] = entries[lane]->address / 4 + i;
    if (count) count_phase(any->use, words, count);
  }
}

bool all_lanes_agree(int first_thread, int lanes) {
  const std::vector<Entry>& model = logs[first_thread];
  for (int lane = 1; lane < lanes; ++lane) {
    const std::vector<Entry>& own = logs[first_thread + lane];
    if (own.size() != model.size()) return false;
    for (size_t i = 0; i < own.size(); ++i)
      if (own[i].site != model[i].site || own[i].use != model[i].use) return false;
  }
  return true;
}

void zip_by_position(int first_thread, int lanes) {
  for (size_t i = 0; i < logs[first_thread].size(); ++i) {
    const Entry* entries[32] = {};
    for (int lane = 0; lane < lanes; ++lane) entries[lane] = &logs[first_thread + lane][i];
    count_access(entries);
  }
}

// Lanes took different paths: the k-th access from a line belongs to the k-th ones of the other lanes from that line.
void zip_by_occurrence(int first_thread, int lanes) {
  using Key = std::tuple<uint16_t, BankUse, uint8_t, int>;  // site, use, bytes, k
  std::vector<std::tuple<Key, int, const Entry*>> all;
  for (int lane = 0; lane < lanes; ++lane) {
    const std::vector<Entry>& own = logs[first_thread + lane];
    std::vector<std::pair<uint16_t, int>> seen;
    for (const Entry& entry : own) {
      auto at = std::find_if(seen.begin(), seen.end(), [&](const auto& one) { return one.first == entry.site; });
      if (at == seen.end()) at = seen.insert(seen.end(), {entry.site, 0});
      all.push_back({Key{entry.site, entry.use, entry.bytes, at->second++}, lane, &entry});
    }
  }
  std::sort(all.begin(), all.end());
  for (size_t i = 0; i < all.size();) {
    const Entry* entries[32] = {};
    const Key key = std::get<0>(all[i]);
    for (; i < all.size() && std::get<0>(all[i]) == key; ++i) entries[std::get<1>(all[i])] = std::get<2>(all[i]);
    count_access(entries);
  }
}

void thread_left(Thread& thread) {
  Warp& warp = warp_at(thread.warp);
  if (warp.alive == 0) converged(warp);
}

}  // namespace

void count_matrix_rows(BankUse use, const uint32_t* rows) {
  if (!config.check) return;
  int load[8] = {}, most = 0;
  for (int i = 0; i < 8; ++i) most = std::max(most, ++load[rows[i] / 16 % 8]);
  if (most == 1) {
    ++counters.phases[int(use)];
    ++counters.wavefronts[int(use)];
    return;
  }
  uint32_t words[32];  // equal rows are one access
  for (int i = 0; i < 32; ++i) words[i] = rows[i / 4] / 4 + i % 4;
  count_phase(use, words, 32);
}

void log_access(BankUse use, uint32_t address, uint32_t bytes, Site site) {
  if (!config.check) return;
  logs[self->linear].push_back({address, site_id(site), uint8_t(bytes), use});
  has_log[self->warp] = true;
}

void converged(Warp& warp) {
  if (!has_log[warp.id]) return;
  has_log[warp.id] = false;
  const int first_thread = 32 * warp.id, lanes = min(32, thread_count - first_thread);
  if (all_lanes_agree(first_thread, lanes))
    zip_by_position(first_thread, lanes);
  else
    zip_by_occurrence(first_thread, lanes);
  for (int lane = 0; lane < lanes; ++lane) logs[first_thread + lane].clear();
}

namespace bank {
const Topic topic = {nullptr, block_start, nullptr, thread_left, nullptr, nullptr};
}

}  // namespace emu
