// An NVRTC for tests that compiles CUDA C for the host: the "cubin" is a shared library.
//
// The text is preprocessed, then rewritten in three places only, and compiled after device.h:
//   asm statements            -> calls of ptx_<mnemonic>(operands in the order of the instruction); an instruction
//                                that device.h does not know is a compile error that names it
//   extern __shared__ T x[];  -> a pointer to the block's dynamic shared memory
//   __launch_bounds__(n, ...) -> removed; n goes to the table of kernels
// MBPERF_EMULATED_REPLACE=/old/new/ replaces a piece of every source before that (any first character separates), to
// see that tests find a broken kernel.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <atomic>
#include <string>
#include <vector>
using std::string;
using std::vector;

namespace {
struct Program { string name, source, log, image; };
enum { OK = 0, OUT_OF_MEMORY = 1, INVALID_INPUT = 3, INVALID_OPTION = 5, COMPILATION = 6 };

const char FLAGS[] = " -std=gnu++17 -O2 -march=native -ffp-contract=off -fno-strict-aliasing -fno-exceptions -fPIC -w "
                     "-fsanitize=alignment,bounds -fsanitize-undefined-trap-on-error ";

string folder() {   // where this library lies, with device.h and runtime.o
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&folder), &info);
    const string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}
string compiler() { const char* c = getenv("CXX"); return c && *c ? c : "c++"; }
string quoted(const string& s) {
    string out = "'";
    for (char c : s) out += c == '\'' ? string("'\\''") : string(1, c);
    return out + "'";
}
bool run(const string& command, string& log) {
    FILE* pipe = popen((command + " 2>&1").c_str(), "r");
    if (!pipe) return false;
    char piece[4096];
    for (size_t n; (n = fread(piece, 1, sizeof piece, pipe));) log.append(piece, n);
    return pclose(pipe) == 0;
}
bool read(const string& path, string& out) {
    FILE* f = fopen(path.c_str(), "rb");
    if (!f) return false;
    char piece[65536];
    for (size_t n; (n = fread(piece, 1, sizeof piece, f));) out.append(piece, n);
    fclose(f);
    return true;
}
bool write(const string& path, const string& text) {
    FILE* f = fopen(path.c_str(), "wb");
    return f && fwrite(text.data(), 1, text.size(), f) == text.size() && fclose(f) == 0;
}
uint64_t hash(const string& s, uint64_t h = 0xcbf29ce484222325ull) {   // FNV-1a
    for (unsigned char c : s) h = (h ^ c) * 0x100000001b3ull;
    return h;
}

bool letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'; }
size_t blanks(const string& s, size_t i) { while (i < s.size() && strchr(" \t\r\n", s[i])) ++i; return i; }
// Whether the word `w` stands at `i`.
bool word(const string& s, size_t i, const char* w) {
    const size_t n = strlen(w);
    return s.compare(i, n, w) == 0 && (i == 0 || !letter(s[i - 1])) && !letter(i + n < s.size() ? s[i + n] : ' ');
}
// Past the string or character literal that begins at `i`.
size_t literal(const string& s, size_t i) {
    const char quote = s[i++];
    while (i < s.size() && s[i] != quote) i += s[i] == '\\' ? 2 : 1;
    return i + 1;
}
// Past the parenthesis that closes the one at `i`.
size_t closing(const string& s, size_t i) {
    int depth = 0;
    while (i < s.size()) {
        const char c = s[i];
        if (c == '"' || c == '\'') { i = literal(s, i); continue; }
        ++i;
        if (strchr("([{", c)) ++depth;
        if (strchr(")]}", c) && --depth == 0) break;
    }
    return i;
}
vector<string> split(const string& s, char at) {   // outside brackets and literals
    vector<string> out(1);
    for (size_t i = 0; i < s.size();) {
        size_t end = i + 1;
        if (s[i] == '"' || s[i] == '\'') end = literal(s, i);
        else if (strchr("([{", s[i])) end = closing(s, i);
        else if (s[i] == at) { out.emplace_back(); ++i; continue; }
        out.back() += s.substr(i, end - i);
        i = end;
    }
    return out;
}
string trimmed(const string& s) {
    const size_t a = blanks(s, 0);
    size_t b = s.size();
    while (b > a && strchr(" \t\r\n", s[b - 1])) --b;
    return s.substr(a, b - a);
}

// The body of an asm statement (between its parentheses) as calls.
string calls(const string& body) {
    const vector<string> sections = split(body, ':');
    string text;
    for (size_t i = 0; i < sections[0].size();)
        if (sections[0][i] == '"') {
            const size_t end = literal(sections[0], i);
            text += sections[0].substr(i + 1, end - i - 2);
            i = end;
        } else ++i;
    for (size_t at; (at = text.find("\\n")) != string::npos;) text.replace(at, 2, " ");
    for (size_t at; (at = text.find("\\t")) != string::npos;) text.replace(at, 2, " ");
    vector<string> operands;
    for (size_t s = 1; s <= 2 && s < sections.size(); ++s)
        for (const string& piece : split(sections[s], ','))
            if (const size_t open = piece.find('('); open != string::npos) operands.push_back(trimmed(piece.substr(open)));
    string out = "{ ";
    for (const string& one : split(text, ';')) {
        const string instruction = trimmed(one);
        if (instruction.empty()) continue;
        size_t end = 0;
        string name;
        while (end < instruction.size() && !strchr(" \t", instruction[end])) {
            const char c = instruction[end++];
            if (letter(c)) name += c;
            else if (name.empty() || name.back() != '_') name += '_';
        }
        out += "ptx_" + name + "(";
        bool first = true;
        string list;
        for (char c : instruction.substr(end)) list += strchr("{}[]", c) ? ' ' : c;
        for (const string& item : split(list, ',')) {
            string operand = trimmed(item);
            if (operand.empty()) continue;
            if (operand.compare(0, 2, "%%") == 0) {
                operand = "emu_sreg_" + operand.substr(2);
                for (char& c : operand) if (c == '.') c = '_';
            } else if (operand[0] == '%') {
                const size_t n = strtoul(operand.c_str() + 1, nullptr, 10);
                operand = n < operands.size() ? operands[n] : "emu_no_such_operand";
            }
            out += (first ? "" : ", ") + operand;
            first = false;
        }
        out += "); ";
    }
    return out + "}";
}

string rewritten(const string& s) {
    string out, kernels;
    for (size_t i = 0; i < s.size();) {
        if (s[i] == '"' || s[i] == '\'') {
            const size_t end = literal(s, i);
            out += s.substr(i, end - i);
            i = end;
        } else if (word(s, i, "asm")) {
            size_t at = blanks(s, i + 3);
            while (letter(s[at])) { while (letter(s[at])) ++at; at = blanks(s, at); }   // volatile
            if (s[at] != '(') { out += s[i++]; continue; }
            const size_t end = closing(s, at);
            out += calls(s.substr(at + 1, end - at - 2));
            i = end;
        } else if (word(s, i, "extern") && word(s, blanks(s, i + 6), "__shared__")) {
            const size_t from = blanks(s, i + 6) + strlen("__shared__"), end = s.find(';', from);
            string declared = s.substr(from, end - from);
            if (const size_t align = declared.find("__align__"); align != string::npos)
                declared.erase(align, closing(declared, declared.find('(', align)) - align);
            declared = trimmed(declared.substr(0, declared.rfind('[')));
            size_t name = declared.size();
            while (name && letter(declared[name - 1])) --name;
            const string type = trimmed(declared.substr(0, name));
            out += "static " + type + "* const " + declared.substr(name) + " = reinterpret_cast<" + type + "*>(emu_dynamic);";
            i = end + 1;
        } else if (word(s, i, "__global__")) {
            // Up to the parameter list: the last word is the name, bounds are taken out.
            string bound = "1024", name;
            size_t at = i + strlen("__global__");
            out += "__global__";
            while (true) {
                const size_t start = at;
                at = blanks(s, at);
                out += s.substr(start, at - start);
                if (at >= s.size() || !letter(s[at])) break;
                size_t end = at;
                while (letter(s[end])) ++end;
                const string w = s.substr(at, end - at);
                if (w == "__launch_bounds__") {
                    const size_t open = blanks(s, end), close = closing(s, open);
                    bound = split(s.substr(open + 1, close - open - 2), ',')[0];
                    end = close;
                } else {
                    out += w;
                    name = w;
                }
                at = end;
            }
            // Templates are kernels' bodies, not kernels.
            size_t before = out.rfind("__global__");
            while (before && strchr(" \t\r\n", out[before - 1])) --before;
            if (before >= 3 && out.compare(before - 3, 3, "\"C\"") == 0) kernels += "    EMU_KERNEL(" + name + ", " + bound + "),\n";
            i = at;
        } else out += s[i++];
    }
    return "#include \"device.h\"\nnamespace {\n" + out + "\nconst EmuKernel emu_list[] = {\n" + kernels +
           "    {nullptr, nullptr, 0, nullptr, 0}};\n}\n"
           "extern \"C\" __attribute__((visibility(\"default\"))) const EmuKernel* emu_kernels(int* count) {\n"
           "    *count = sizeof emu_list / sizeof emu_list[0] - 1;\n    return emu_list;\n}\n";
}

string replaced(string source) {
    const char* rule = getenv("MBPERF_EMULATED_REPLACE");
    if (!rule || !*rule) return source;
    const char* middle = strchr(rule + 1, *rule);
    const char* end = middle ? strchr(middle + 1, *rule) : nullptr;
    if (!end) { fprintf(stderr, "MBPERF_EMULATED_REPLACE is not of the form /old/new/\n"); return source; }
    const string from(rule + 1, middle), to(middle + 1, end);
    for (size_t at = 0; (at = source.find(from, at)) != string::npos; at += to.size()) source.replace(at, from.size(), to);
    return source;
}

int compile(Program& p, const vector<string>& options) {
    string defines = " -D__CUDACC__=1 -D__CUDACC_RTC__=1";
    for (const string& o : options) {
        if (o.compare(0, 2, "-D") == 0) defines += " " + quoted(o);
        const char arch[] = "--gpu-architecture=sm_";
        if (o.compare(0, strlen(arch), arch) == 0) {
            const int cc = atoi(o.c_str() + strlen(arch));
            if (cc < 80 || cc > 89) {
                p.log = "the emulation compiles for sm_80 to sm_89, not " + o;
                return INVALID_OPTION;
            }
            defines += " -D__CUDA_ARCH__=" + std::to_string(cc * 10);
        }
    }
    const string home = folder(), source = replaced(p.source);
    const char* tmp = getenv("TMPDIR");
    const char* asked = getenv("MBPERF_EMULATED_CACHE");
    const string cache = asked ? asked : string(tmp ? tmp : "/tmp") + "/mbperf-emulated-cuda-" + std::to_string(getuid());
    mkdir(cache.c_str(), 0700);
    string device;
    read(home + "/device.h", device);
    read(home + "/runtime.h", device);
    read(home + "/runtime.o", device);
    char key[40];
    const string all = source + defines + FLAGS + compiler() + device;
    snprintf(key, sizeof key, "%016llx%016llx", (unsigned long long)hash(all), (unsigned long long)hash(all, 0x1234567));
    const string library = cache + "/" + key + ".so";
    if (read(library, p.image)) return OK;
    static std::atomic<int> serial{0};
    const string base = cache + "/" + key + "." + std::to_string(getpid()) + "." + std::to_string(serial++);
    string text;
    const string cxx = compiler();
    bool good = write(base + ".cu", source) &&
                run(cxx + " -E -undef -x c++ -std=gnu++17 -w" + defines + " " + quoted(base + ".cu") + " -o " + quoted(base + ".ii"), p.log) &&
                read(base + ".ii", text) && write(base + ".cpp", rewritten(text)) &&
                run(cxx + FLAGS + "-shared -I" + quoted(home) + " " + quoted(base + ".cpp") + " " + quoted(home + "/runtime.o") + " -o " + quoted(base + ".so"), p.log) &&
                read(base + ".so", p.image);
    if (good) rename((base + ".so").c_str(), library.c_str());
    if (!getenv("MBPERF_EMULATED_KEEP"))
        for (const char* end : {".cu", ".ii", ".cpp"}) unlink((base + end).c_str());
    return good ? OK : COMPILATION;
}
}  // namespace

extern "C" {
// The second number changes with the emulation and the replacement, and with it the keys of mbperf's own cache.
int nvrtcVersion(int* major, int* minor) {
    const char* rule = getenv("MBPERF_EMULATED_REPLACE");
    *major = 13;
    *minor = (int)((EMULATION + hash(rule ? rule : "") % 1000003) % 1000003);
    return OK;
}
int nvrtcGetNumSupportedArchs(int* n) { *n = 4; return OK; }
int nvrtcGetSupportedArchs(int* out) {
    for (int arch : {80, 86, 87, 89}) *out++ = arch;
    return OK;
}
int nvrtcCreateProgram(Program** p, const char* source, const char* name, int headers, const char* const*, const char* const*) {
    if (headers) return INVALID_INPUT;
    *p = new Program{name, source, "", ""};
    return OK;
}
int nvrtcCompileProgram(Program* p, int count, const char* const* options) {
    return compile(*p, vector<string>(options, options + count));
}
int nvrtcDestroyProgram(Program** p) { delete *p; *p = nullptr; return OK; }
int nvrtcGetProgramLogSize(Program* p, size_t* n) { *n = p->log.size() + 1; return OK; }
int nvrtcGetProgramLog(Program* p, char* out) { memcpy(out, p->log.c_str(), p->log.size() + 1); return OK; }
int nvrtcGetCUBINSize(Program* p, size_t* n) { *n = p->image.size(); return OK; }
int nvrtcGetCUBIN(Program* p, char* out) { memcpy(out, p->image.data(), p->image.size()); return OK; }
// There is no PTX of a host's program: it compiles for the emulated device, which needs none.
int nvrtcGetPTXSize(Program*, size_t* n) { *n = 0; return OK; }
int nvrtcGetPTX(Program*, char*) { return INVALID_INPUT; }
}
