// topics.cpp: the topics of the runtime, in the order in which their hooks are called.
//
// Clocks come first: the other topics keep some.
#include "hopper.h"
#include "runtime.h"

namespace emu {

const Topic* const topics[] = {
    &clock_topic::topic, &arithmetic::topic, &blocks::topic,  &shadow::topic, &bank::topic,  &collective_topic::topic,
    &barrier::topic,     &cp_async::topic,   &mbarrier::topic, &tma::topic,   &wgmma::topic, &registers::topic,
};
const int topic_count = sizeof topics / sizeof topics[0];

}  // namespace emu
