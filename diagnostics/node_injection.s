# The machine code that node_injection.py carries as `STUB`, for Linux on x86_64. GNU as, Intel syntax.
#
#   as -o stub.o node_injection.s && objcopy -O binary -j .text stub.o stub.bin
#
# node_injection.py writes it into a page of the process, points a sleeping thread to `entry` and detaches. Nothing here
# depends on the address it runs at. A test assembles this file and compares the bytes.
#
# The thread that runs it was taken out of a system call, anywhere in the program. It must leave with every register, the
# flags and the stack as they were. Floating-point and vector registers need no care: the thread calls no function of the
# program, and the kernel keeps them across a system call.

        .intel_syntax noprefix
        .text

# If the kernel still repeats the interrupted system call, it subtracts 2 from the program counter. The thread then
# starts in these bytes, and nothing is lost.
        .fill   8, 1, 0x90              # nop

# The thread saves what the program may be using.
entry:
        lea     rsp, [rsp - 128]        # the red zone: a leaf function may keep values below the stack pointer
        pushfq
        push    rax
        push    rcx
        push    rdx
        push    rbx
        push    rbp
        push    rsi
        push    rdi
        push    r8
        push    r9
        push    r10
        push    r11
        push    r12
        push    r13
        push    r14
        push    r15
        mov     rbp, rsp
        and     rsp, -16                # the grandchild calls a C++ function, which needs an aligned stack

# Fork, and wait for the child, which ends at once (below). No zombie is left, and neither the program's own wait() nor
# its SIGCHLD handler sees the child.
        call    fork
        test    rax, rax
        jz      child
        js      restore                 # no child could be made: there is no answer, but no harm either
        mov     rdi, rax
wait:
        xor     esi, esi                # status: not wanted
        mov     edx, 0x40000000         # __WALL: also a child that sends no signal at its end
        xor     r10d, r10d              # rusage: not wanted
        mov     eax, 61                 # wait4
        syscall
        cmp     rax, -4                 # EINTR: a signal came; its handler has run
        je      wait

# Put everything back, and go to where the kernel would have let the thread continue.
restore:
        mov     rsp, rbp
        pop     r15
        pop     r14
        pop     r13
        pop     r12
        pop     r11
        pop     r10
        pop     r9
        pop     r8
        pop     rdi
        pop     rsi
        pop     rbp
        pop     rbx
        pop     rdx
        pop     rcx
        pop     rax
        popfq
        lea     rsp, [rsp + 128]        # lea, as above: add would change the flags
        mov     rax, [rip + final_rax]
        jmp     [rip + final_rip]

# fork() as clone(2), with no exit signal: the parent gets no SIGCHLD.
fork:
        xor     edi, edi                # flags and exit signal
        xor     esi, esi                # stack: a copy of the parent's
        xor     edx, edx
        xor     r10d, r10d
        xor     r8d, r8d
        mov     eax, 56                 # clone
        syscall
        ret

# The child forks again and ends, so that the thread is free again at once. init reaps the grandchild.
child:
        call    fork
        test    rax, rax
        jz      grandchild
end:
        xor     edi, edi
        mov     eax, 231                # exit_group(0): no handler of the program runs
        syscall

# The grandchild is a copy of the process with this thread only. It puts 256 zero bytes on the stack, which serve as
# `struct rlimit`, `struct sigaction`, signal set and result below.
grandchild:
        and     rsp, -16
        sub     rsp, 256
        mov     rdi, rsp
        xor     eax, eax
        mov     ecx, 32
        rep stosq

# It must not disturb the job: a session of its own, no core file, and death by SIGALRM after 10 seconds.
        mov     eax, 112                # setsid: out of reach of signals to the process group
        syscall
        mov     edi, 4                  # RLIMIT_CORE
        mov     rsi, rsp                # {0, 0}
        mov     eax, 160                # setrlimit
        syscall
        mov     edi, 14                 # SIGALRM
        mov     rsi, rsp                # SIG_DFL, no flags
        xor     edx, edx
        mov     r10d, 8                 # bytes of a signal set
        mov     eax, 13                 # rt_sigaction
        syscall
        mov     edi, 2                  # SIG_SETMASK
        mov     rsi, rsp                # no signal blocked
        xor     edx, edx
        mov     r10d, 8
        mov     eax, 14                 # rt_sigprocmask
        syscall
        mov     edi, 10
        mov     eax, 37                 # alarm
        syscall

# std::string c10d::dump_fr_trace_json(bool includeCollectives, bool onlyActive), called with (true, false). The caller
# provides the string object: libstdc++ leaves the pointer to the text at [rsp] and its length at [rsp + 8].
        mov     rdi, rsp
        mov     esi, 1
        xor     edx, edx
        call    [rip + function]

# Connect to the socket that node_injection.py listens on.
        mov     edi, 1                  # AF_UNIX
        mov     esi, 1                  # SOCK_STREAM
        xor     edx, edx
        mov     eax, 41                 # socket
        syscall
        mov     r12d, eax
        mov     edi, eax
        lea     rsi, [rip + address]
        mov     edx, 24                 # sizeof address: the family, a zero byte, 21 characters
        mov     eax, 42                 # connect
        syscall
        test    rax, rax
        js      end                     # nobody listens any longer

# Write the whole text, then end.
        mov     r13, [rsp]
        mov     r14, [rsp + 8]
more:
        test    r14, r14
        jz      end
        mov     edi, r12d
        mov     rsi, r13
        mov     rdx, r14
        mov     eax, 1                  # write
        syscall
        test    rax, rax
        jle     end
        add     r13, rax
        sub     r14, rax
        jmp     more
code_end:

# node_injection.py writes these values behind the code; they differ from thread to thread.
        .equ    final_rax, code_end     # rax with which the thread continues: the number of the call to repeat
        .equ    final_rip, code_end + 8 # where it continues
        .equ    function, code_end + 16 # address of c10d::dump_fr_trace_json in this process
        .equ    address, code_end + 24  # struct sockaddr_un, 24 bytes
