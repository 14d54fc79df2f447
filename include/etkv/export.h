/*
 * ETKV_API: marks the functions of the C interface. A part of etkv.h.
 *
 * Define ETKV_STATIC to link the static library. The build of the shared
 * library defines ETKV_BUILDING. Both matter on Windows only, which etkv does
 * not support yet.
 */
#ifndef ETKV_EXPORT_H
#define ETKV_EXPORT_H

#if defined(ETKV_STATIC)
#define ETKV_API
#elif defined(_WIN32) && defined(ETKV_BUILDING)
#define ETKV_API __declspec(dllexport)
#elif defined(_WIN32)
#define ETKV_API __declspec(dllimport)
#elif defined(__GNUC__)
#define ETKV_API __attribute__((visibility("default")))
#else
#define ETKV_API
#endif

#endif /* ETKV_EXPORT_H */
