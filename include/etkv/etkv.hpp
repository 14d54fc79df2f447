// etkv for C++17: the faces of a cache, and the session by which a program
// finds the cache. Header only, over etkv.h. It needs neither exceptions nor
// RTTI.
//
//   auto session = etkv::make_decode_session("MLXBackend", config);
//   if (!session.ok()) return complain(session.error());
//   load(program, {{"cache_key", session->key()}});
//   while (session->cache().can_extend().value_or(false)) ...
//
// A runner uses a cache through one of its faces: `Cache`, `SeqCache` or
// `TreeCache`. Making the session checks once that the cache has the face.
//
// A call that can fail returns a Result, in the shape of std::expected. Reading
// the value of a Result that has an error, or the error of one that has a
// value, ends the process with a message. Calls that cannot fail return their
// value directly.
//
// Ownership and threads are as etkv.h says. Objects here own their handles:
// they are moved, not copied. Move an object on one thread at a time.
#pragma once

#include "etkv/etkv.h"

#include "etkv/cache.hpp"
#include "etkv/config.hpp"
#include "etkv/detail.hpp"
#include "etkv/error.hpp"
#include "etkv/generation.hpp"
#include "etkv/memory.hpp"
#include "etkv/prefix.hpp"
#include "etkv/result.hpp"
#include "etkv/saving.hpp"
#include "etkv/seq.hpp"
#include "etkv/session.hpp"
#include "etkv/watch.hpp"
