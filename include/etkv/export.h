/*
 * ETKV_API: what marks the functions of the C interface. A part of etkv.h.
 *
 * ETKV_STATIC is defined by who links the static library, ETKV_BUILDING where the
 * shared one is built. Both matter on Windows, for which nothing is built yet.
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
