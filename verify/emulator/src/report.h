// report.h: what launch, memory and report need of each other, and no topic does.
#pragma once
#include <string>

namespace emu {

void forget_record();        // findings and counters
int finding_count();         // in the record
void forget_traffic();       // the tensors' bytes read and written (memory.cpp)
std::string tensors_json();  // {"q": {"read": bytes, "written": bytes}, ...} (memory.cpp)

}  // namespace emu
