// report.cpp: findings and counters, as text and JSON, and the numbers that stand for call sites.
//
// A finding is reported once per kind and pair of lines; further ones are only counted. Without Config::collect the
// first one ends the run. Holds: `stopped` stays true until the record is forgotten, so that no launch follows a fault.
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <tuple>
#include <unordered_map>

#include "report.h"
#include "runtime.h"

namespace emu {

Counters counters = {};

namespace {

struct Finding {
  std::string kind, sentence;
  Site at, other;
  int thread;  // -1: none
  uint3 block;
  int count;
};
std::vector<Finding> findings;
std::map<std::tuple<std::string, std::string, int, std::string, int>, size_t> known;  // kind, lines: index
bool is_stopped = false;

constexpr int kSites = 0xffff;
std::vector<Site> sites(1);
struct CachedSite {
  Site site;
  uint16_t id = 0;
};
CachedSite cached_sites[1024];
std::unordered_map<uint64_t, std::vector<uint16_t>> known_sites;  // by code and line

bool is_same(Site a, Site b) { return a.code == b.code && a.line == b.line && a.file == b.file; }

std::string file_name(Site site) {
  if (!site.file) return "";
  const char* slash = strrchr(site.file, '/');
  return slash ? slash + 1 : site.file;
}

std::string formatted(const char* format, va_list arguments) {
  va_list again;
  va_copy(again, arguments);
  std::string text(vsnprintf(nullptr, 0, format, again), '\0');
  va_end(again);
  vsnprintf(&text[0], text.size() + 1, format, arguments);
  return text;
}

void record(const char* kind, Site at, Site other, const Thread* thread, std::string sentence) {
  const auto [entry, is_new] =
      known.try_emplace({kind, file_name(at), at.line, file_name(other), other.line}, findings.size());
  if (!is_new) {
    ++findings[entry->second].count;
    return;
  }
  if (at.file) sentence = place(at) + ": " + sentence;
  if (gridDim.x * uint64_t(gridDim.y) * gridDim.z > 1 && thread)
    sentence += " [block " + std::to_string(blockIdx.x) + "," + std::to_string(blockIdx.y) + "," +
                std::to_string(blockIdx.z) + "]";
  findings.push_back({kind, sentence, at, other, thread ? thread->linear : -1, blockIdx, 1});
}

std::string quoted(const std::string& text) {
  std::string made = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      made += '\\';
      made += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      snprintf(escaped, sizeof escaped, "\\u%04x", c);
      made += escaped;
    } else {
      made += c;
    }
  }
  return made + "\"";
}

std::string findings_json() {
  std::string text = "[";
  for (const Finding& one : findings) {
    text += text.size() > 1 ? ",\n " : "";
    text += "{\"kind\": " + quoted(one.kind) + ", \"file\": " + quoted(file_name(one.at)) +
            ", \"line\": " + std::to_string(one.at.line);
    text += ", \"other\": " + (one.other.file ? std::to_string(one.other.line) : "null");
    text += ", \"other_file\": " + (one.other.file ? quoted(file_name(one.other)) : "null");
    text += ", \"thread\": " + (one.thread >= 0 ? std::to_string(one.thread) : "null");
    text += ", \"block\": [" + std::to_string(one.block.x) + ", " + std::to_string(one.block.y) + ", " +
            std::to_string(one.block.z) + "]";
    text += ", \"count\": " + std::to_string(one.count) + ", \"sentence\": " + quoted(one.sentence) + "}";
  }
  return text + "]";
}

std::string counters_json() {
  std::string text = "{\"tensors\": " + tensors_json();
  const auto add = [&](const char* key, uint64_t value) {
    text += std::string(", \"") + key + "\": " + std::to_string(value);
  };
  add("switches", counters.switches);
  add("mma", counters.mma);
  add("wgmma", counters.wgmma);
  add("tma", counters.tma);
  add("barriers", counters.barriers);
  const char* const uses[] = {"ldmatrix", "stmatrix", "ld", "st", "cp_async"};  // BankUse
  text += ", \"bank\": {";
  for (int use = 0; use < 5; ++use)
    text += std::string(use ? ", \"" : "\"") + uses[use] + "\": [" + std::to_string(counters.phases[use]) + ", " +
            std::to_string(counters.wavefronts[use]) + "]";
  char seconds[32];
  snprintf(seconds, sizeof seconds, "%.6f", counters.seconds);
  return text + "}, \"seconds\": " + seconds + "}";
}

// Copies as much as fits, always closed by a 0; returns the bytes that all of it needs.
size_t give(const std::string& text, char* buffer, size_t n) {
  if (buffer && n) {
    const size_t fits = text.size() < n ? text.size() : n - 1;
    memcpy(buffer, text.data(), fits);
    buffer[fits] = 0;
  }
  return text.size() + 1;
}

}  // namespace

std::string name(const Thread& thread) { return "thread " + std::to_string(thread.linear); }

// Followed by the code address between two control characters, which emulator.py replaces by the calls around it.
std::string place(Site site) {
  if (!site.file) return "an unknown line";
  const std::string line = file_name(site) + ":" + std::to_string(site.line);
  return site.code ? line + "\x01" + std::to_string(site.code) + "\x02" : line;
}

std::string shared_name(uint32_t address) {
  char text[48];
  snprintf(text, sizeof text, "shared memory %c0x%x", address < kSharedBase ? '-' : '+',
           address < kSharedBase ? kSharedBase - address : address - kSharedBase);
  return text;
}

uint16_t site_id(Site site) {
  CachedSite& cached = cached_sites[(uint32_t(site.line) ^ site.code ^ site.code >> 10) % 1024];
  if (cached.id && is_same(cached.site, site)) return cached.id;
  std::vector<uint16_t>& alike = known_sites[uint64_t(site.code) << 32 | uint32_t(site.line)];
  for (const uint16_t id : alike)
    if (is_same(sites[id], site)) {
      cached = {site, id};
      return id;
    }
  if (sites.size() == kSites) return 0;
  const auto id = uint16_t(sites.size());
  sites.push_back(site);
  alike.push_back(id);
  cached = {site, id};
  return id;
}

Site site_of(uint16_t id) { return sites[id]; }

void finding(const char* kind, Site at, Site other, const Thread* thread, const char* format, ...) {
  {
    va_list arguments;
    va_start(arguments, format);
    record(kind, at, other, thread, formatted(format, arguments));
    va_end(arguments);
  }
  if (config.collect) return;
  is_stopped = true;
  if (self) abandon_block();
}

void fatal(const char* kind, Site at, Site other, const Thread* thread, const char* format, ...) {
  {
    va_list arguments;
    va_start(arguments, format);
    record(kind, at, other, thread, formatted(format, arguments));
    va_end(arguments);
  }
  is_stopped = true;
  if (self) abandon_block();
}

bool stopped() { return is_stopped; }
int finding_count() { return int(findings.size()); }

void forget_record() {
  findings.clear();
  known.clear();
  is_stopped = false;
  counters = {};
  forget_traffic();
}

}  // namespace emu

extern "C" {

int emu_findings(char* json, size_t n) {
  emu::give(json ? emu::findings_json() : "", json, n);
  return emu::finding_count();
}

size_t emu_findings_bytes() { return emu::findings_json().size() + 1; }

int emu_counters(char* json, size_t n) { return int(emu::give(emu::counters_json(), json, n)); }

void emu_reset() { emu::forget_record(); }
}
