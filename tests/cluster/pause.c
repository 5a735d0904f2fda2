/* Holds a pod's namespaces; the whole of the sandbox image. */
#include <unistd.h>
int main(void) { for (;;) pause(); }
