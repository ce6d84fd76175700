/* A driver's library for tests. FAKE_CUDA has a line for each GPU: its attributes and memory, the first byte of its UUID, and its
   name. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FIGURES = 10, MOST = 4 };
static const int attributes[FIGURES] = {16, 13, 36, 37, 38, 97, 75, 76, 18, 0};
static struct {
    long long figures[FIGURES];
    unsigned char uuid;
    char name[64];
} gpus[MOST];
static int count;

int cuInit(unsigned flags) {
    const char* line = getenv("FAKE_CUDA");
    for (count = 0; line && count < MOST; ++count) {
        long long* f = gpus[count].figures;
        unsigned uuid;
        if (sscanf(line, "%lld %lld %lld %lld %lld %lld %lld %lld %lld %lld %x %63[^\n]", f, f + 1, f + 2, f + 3, f + 4,
                   f + 5, f + 6, f + 7, f + 8, f + 9, &uuid, gpus[count].name) != 12)
            break;
        gpus[count].uuid = uuid;
        line = strchr(line, '\n');
        line = line ? line + 1 : NULL;
    }
    return count ? 0 : 100;
}
int cuDeviceGetCount(int* result) { return *result = count, 0; }
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
