/* A driver's library for tests; `gpus.h` has a line for each GPU: attributes and memory, first byte of the UUID, name. */
#include <string.h>

enum { FIGURES = 10 };
static const int attributes[FIGURES] = {16, 13, 36, 37, 38, 97, 75, 76, 18, 0};
static const struct {
    long long figures[FIGURES];
    unsigned char uuid;
    const char* name;
} gpus[] = {
#include "gpus.h"
};

int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int* result) { return *result = sizeof gpus / sizeof *gpus, 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDeviceGetName(char* name, int size, int device) { return strncpy(name, gpus[device].name, size), 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { return *bytes = gpus[device].figures[FIGURES - 1], 0; }
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    return memset(uuid, 0, 16), *uuid = gpus[device].uuid, 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    for (int i = 0; i < FIGURES - 1; ++i)
        if (attributes[i] == attribute) return *value = gpus[device].figures[i], 0;
    return 1;
}
