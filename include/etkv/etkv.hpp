// etkv for C++17: the faces of a cache, and the session that a program finds it
// by. Header only, over etkv.h; needs neither exceptions nor RTTI.
//
//   auto session = etkv::make_decode_session("MLXBackend", config);
//   if (!session.ok()) return complain(session.error());
//   load(program, {{"cache_key", session->key()}});
//   while (session->cache().can_extend().value_or(false)) ...
//
// What a runner may do with a cache is the face that it holds: `Cache`,
// `SeqCache` or `TreeCache`. That the cache can do it is found out once, when the
// session is made.
//
// What can fail returns a Result, in the shape of std::expected; asking one for what
// it does not have ends the process with its message. What cannot fail returns its
// value.
//
// Ownership and threads are as etkv.h says. Objects here own their handles: they
// are moved, not copied, and moving one is for one thread at a time.
#pragma once

#include "etkv/etkv.h"

#include "etkv/cache.hpp"
#include "etkv/config.hpp"
#include "etkv/custom.hpp"
#include "etkv/detail.hpp"
#include "etkv/error.hpp"
#include "etkv/kinds.hpp"
#include "etkv/log.hpp"
#include "etkv/memory.hpp"
#include "etkv/registry.hpp"
#include "etkv/report.hpp"
#include "etkv/result.hpp"
#include "etkv/seq.hpp"
#include "etkv/session.hpp"
#include "etkv/tree.hpp"
