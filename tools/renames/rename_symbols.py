"""Rename symbols of a typed tree by one run of mypy.

semrename.py ROOT LIST [--apply]
LIST: `path.py::Class.member new`, `path.py::func@param new` ... Owners may be written by old or new names.
Prints FAILED, CONFLICT, UNRESOLVED (attribute tokens on Any whose name is renamed), and writes the edits.
"""
import ast, sys, re, os, time, collections
from pathlib import Path
from mypy import build, nodes as N, types as T
from mypy.options import Options
from mypy.modulefinder import BuildSource
root = Path(sys.argv[1]).resolve(); listing = Path(sys.argv[2]); doit = "--apply" in sys.argv
os.chdir(root)
sys.path.insert(0, str(root))
opt = Options(); opt.python_version = (3, 11); opt.export_types = True; opt.preserve_asts = True; opt.native_parser = False
opt.check_untyped_defs = True; opt.ignore_missing_imports = True; opt.incremental = True; opt.cache_dir = "/tmp/windlass-mypy"; opt.ignore_errors = True
opt.show_traceback = True; opt.allow_redefinition = False; opt.namespace_packages = True; opt.explicit_package_bases = True
opt.python_executable = str(root / ".venv/bin/python"); opt.warn_unreachable = False
opt.disable_error_code = []
from mypy.find_sources import create_source_list
import shutil
DIRS = os.environ.get("DIRS", "windlass tests bench tools examples").split()
for d in DIRS:
    for c in Path("/tmp/windlass-mypy").glob(f"*/{d}*"): shutil.rmtree(c) if c.is_dir() else c.unlink()
    for c in Path("/tmp/windlass-mypy").glob("*.db*"): pass
opt.sqlite_cache = False
def modname(p):
    parts = list(p.with_suffix("").parts)
    if parts[-1] == "__init__": parts.pop()
    return ".".join(parts)
paths = [p.relative_to(root) for d in DIRS for p in sorted((root / d).rglob("*.py"))]
paths = [p for p in paths if "compat/path/" not in str(p)]
sources = []; seen = set()
for p in paths:
    m = modname(p)
    if all(x.isidentifier() for x in m.split(".")) and m not in seen:
        seen.add(m); sources.append(BuildSource(str(p), m))
t0 = time.time()
res = build.build(sources, opt)
print(f"mypy {time.time()-t0:.0f}s, {len(res.files)} modules", flush=True)
ours = {s.module: s for s in sources}
types = res.types
# ---- symbol tables
TOP = ("windlass", "tests", "bench", "tools", "examples")
def is_ours(fullname): return fullname.split(".")[0] in TOP
infos = {}
def visit_classes(names):
    for n in list(names.values()):
        if isinstance(n.node, N.TypeInfo) and is_ours(n.node.fullname) and n.node.fullname not in infos:
            infos[n.node.fullname] = n.node; visit_classes(n.node.names)
SKIP = {"node", "info", "type", "unanalyzed_type", "var", "names", "mro", "expanded", "unanalyzed_items", "type_guard", "alias_tvars", "special_alias", "fullname", "name", "line", "column", "end_line", "end_column"}
ATTRS = {}
def attrs_of(t):
    if t not in ATTRS:
        ATTRS[t] = [n for c in t.__mro__ for n, d in vars(c).items() if type(d).__name__ in ("getset_descriptor", "member_descriptor") and n not in SKIP]
    return ATTRS[t]
class Nodes:
    def __init__(self): self.at = {}; self.params = {}; self.seen = set()
    def take(self, root):
        todo = [root]; seen = self.seen
        while todo:
            o = todo.pop()
            if isinstance(o, (list, tuple)): todo.extend(o); continue
            if isinstance(o, dict): todo.extend(o.values()); continue
            if not isinstance(o, N.Node) or isinstance(o, (N.TypeInfo, N.Var)) or id(o) in seen: continue
            seen.add(id(o))
            if isinstance(o, (N.NameExpr, N.MemberExpr, N.CallExpr, N.SuperExpr)):
                self.at[(o.line, o.column, o.end_line, o.end_column, type(o).__name__)] = o
            elif isinstance(o, N.ClassDef):
                if o.info: infos.setdefault(o.info.fullname, o.info)
            elif isinstance(o, N.FuncDef):
                for a in (o.arguments if hasattr(o, 'arguments') else ()): self.params[id(a.variable)] = (o, a.variable.name); keep.append(a.variable)
            for n in attrs_of(type(o)):
                try: value = getattr(o, n)
                except (AttributeError, AssertionError): continue
                if isinstance(value, (N.Node, list, tuple, dict)): todo.append(value)
keep = []
trees = {}
for m, s in ours.items():
    f = res.files.get(m)
    if f is None: print("no tree", m); continue
    v = Nodes(); v.take(f.defs); trees[m] = (f, v)
for m, (f, v) in trees.items(): visit_classes(f.names)
# ---- union-find over override groups
parent = {}
def find(k):
    while parent.get(k, k) != k: k = parent[k]
    return k
def union(a, b):
    a, b = find(a), find(b)
    if a != b: parent[a] = b
def argnames(f):
    try: return [a.variable.name for a in f.arguments]
    except AttributeError: return [n for n in f.arg_names if n]
def funcdef(node):
    if isinstance(node, N.Decorator): return node.func
    if isinstance(node, N.OverloadedFuncDef):
        i = node.items[0]; return i.func if isinstance(i, N.Decorator) else i
    return node if isinstance(node, N.FuncDef) else None
for full, info in infos.items():
    for name, sym in info.names.items():
        for base in info.mro[1:]:
            if is_ours(base.fullname) and name in base.names:
                union(f"{full}.{name}", f"{base.fullname}.{name}")
                a, b = funcdef(sym.node), funcdef(base.names[name].node)
                if a and b and name != "__init__":
                    common = set(argnames(a)) & set(argnames(b))
                    for c in common: union(f"{full}.{name}@{c}", f"{base.fullname}.{name}@{c}")
def lookup(info, name):
    for c in info.mro:
        if name in c.names: return f"{c.fullname}.{name}" if is_ours(c.fullname) else None
    return None
ANY = object()
def owners(t):
    """TypeInfos that an expression of this type has."""
    t = T.get_proper_type(t)
    if isinstance(t, T.Instance): return [t.type]
    if isinstance(t, T.UnionType): return [o for i in t.items for o in owners(i)]
    if isinstance(t, T.TypeVarType):
        return [o for v in t.values for o in owners(v)] or owners(t.upper_bound)
    if isinstance(t, T.TupleType): return [t.partial_fallback.type]
    if isinstance(t, T.TypedDictType): return [t.fallback.type]
    if isinstance(t, T.LiteralType): return owners(t.fallback)
    if isinstance(t, T.TypeType): return owners(t.item)
    if isinstance(t, T.CallableType):
        if t.is_type_obj(): return owners(t.ret_type)
        return []
    if isinstance(t, T.Overloaded):
        return owners(t.items[0].ret_type) if t.items and t.items[0].is_type_obj() else []
    if isinstance(t, T.AnyType): return [ANY]
    return []
def member_keys(e):
    x = e.expr
    if isinstance(x, N.RefExpr) and isinstance(x.node, N.MypyFile):
        if x.node.names.get(e.name) is not None:
            n = x.node.names[e.name].node
            return [n.fullname] if n is not None and getattr(n, "fullname", "") and is_ours(n.fullname) else []
        return []
    if isinstance(x, N.RefExpr) and isinstance(x.node, N.TypeInfo):
        k = lookup(x.node, e.name); return [k] if k else []
    t = types.get(x)
    if t is None: return [ANY]
    out = []
    for o in owners(t):
        if o is ANY: out.append(ANY)
        else:
            k = lookup(o, e.name)
            if k: out.append(k)
            elif any(b.fallback_to_any for b in [o]): out.append(ANY) if not o.fullname.startswith("torch") else None
    return out
def node_key(n):
    if n is None: return None
    if isinstance(n, (N.Decorator,)): n = n.func
    full = getattr(n, "fullname", "")
    if not full or not is_ours(full): return None
    return full
# ---- jobs
jobs = []; back = {}
for raw in listing.read_text().splitlines():
    line = raw.split("#")[0].strip()
    if not line: continue
    try: target, new = line.split()
    except ValueError: print("BAD LINE", raw); continue
    path, dotted = target.split("::"); jobs.append((path, dotted, new))
    if "@" not in dotted: back.setdefault((path, new), dotted.split(".")[-1])
want = {}; origin = {}; failed = []
def exists(key):
    base, _, par = key.partition("@")
    mod = None
    for m in sorted(trees, key=len, reverse=True):
        if base == m or base.startswith(m + "."): mod = m; break
    if mod is None: return False
    rest = base[len(mod) + 1:].split(".")
    sym = trees[mod][0].names.get(rest[0])
    if sym is None or sym.node is None: return False
    node = sym.node
    if getattr(node, "fullname", "") != f"{mod}.{rest[0]}" and not isinstance(node, N.Decorator): return False
    for r in rest[1:]:
        if not isinstance(node, N.TypeInfo) or r not in node.names: return False
        node = node.names[r].node
    if par:
        f = funcdef(node)
        return f is not None and par in argnames(f)
    return True
for path, dotted, new in jobs:
    mod = modname(Path(path)); names, _, par = dotted.partition("@"); parts = names.split(".")
    tail = ("@" + par) if par else ""
    last = len(parts) - (0 if par else 1)
    for o in (parts, [back.get((path, x), x) if i < last else x for i, x in enumerate(parts)], [back.get((path, x), x) if i < min(last, 1) else x for i, x in enumerate(parts)]):
        key = f"{mod}." + ".".join(o) + tail
        if exists(key): break
    else:
        failed.append(f"{path}::{dotted} {new}"); print("FAILED", path, dotted, new); continue
    g = find(key)
    if g in want and want[g] != new: print(f"CONFLICT group {key}: {origin[g]} -> {want[g]}, now {new}")
    want[g] = new; origin[g] = key
def wanted(key):
    return want.get(find(key)) if key and key is not ANY else None
oldnames = {k.split("@")[-1] if "@" in k else k.split(".")[-1] for k in origin.values()}
# ---- edits
edits = collections.defaultdict(dict); report = []; counts = collections.Counter()
def edit(path, ln, col, old, new, key):
    had = edits[path].get((ln, col))
    if had and had[1] != new: report.append(f"CONFLICT {path}:{ln}: {old} -> {had[1]} or {new}")
    edits[path][(ln, col)] = (old, new); counts[key] += 1
for m, (f, v) in trees.items():
    path = ours[m].path; src = Path(path).read_text(); lines = src.split("\n"); tree = ast.parse(src)
    blines = [l.encode() for l in lines]
    pkg = m if Path(path).name == "__init__.py" else m.rpartition(".")[0]
    def textat(ln, col, n): return blines[ln - 1][col: col + n].decode(errors="replace")
    def get(node, kind): return v.at.get((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, kind))
    def module_key(name):
        s = f.names.get(name)
        return node_key(s.node) if s is not None and s.node is not None else None
    def ref_name(node, in_ann=False):
        e = get(node, "NameExpr")
        if e is not None and not in_ann:
            n = e.node
            if n is not None and id(n) in v.params:
                fn, pname = v.params[id(n)]
                return f"{fn.fullname}@{pname}" if is_ours(fn.fullname) else None
            if e.kind == N.LDEF: return None
            if e.kind == N.MDEF and n is not None and getattr(n, "info", None): return f"{n.info.fullname}.{node.id}"
            return node_key(n) or (module_key(node.id) if n is None else None)
        return module_key(node.id)
    def do_name(node, in_ann=False):
        k = ref_name(node, in_ann); new = wanted(k)
        if new and k.split("@")[-1].split(".")[-1] == node.id: edit(path, node.lineno, node.col_offset, node.id, new, k)
    def attr_keys(node, in_ann):
        e = get(node, "MemberExpr")
        if e is None:
            s = get(node, "SuperExpr")
            if s is not None:
                if s.info:
                    for c in s.info.mro[1:]:
                        if node.attr in c.names: return [f"{c.fullname}.{node.attr}"] if is_ours(c.fullname) else []
                return []
            # annotation or dead code
            if isinstance(node.value, ast.Name):
                s = f.names.get(node.value.id)
                if s is not None and isinstance(s.node, N.MypyFile):
                    n = s.node.names.get(node.attr)
                    return [node_key(n.node)] if n is not None and n.node is not None and node_key(n.node) else []
                if s is not None and isinstance(s.node, N.TypeInfo):
                    k = lookup(s.node, node.attr); return [k] if k else []
            return [] if in_ann else [ANY]
        return member_keys(e)
    def do_attr(node, in_ann=False):
        ks = attr_keys(node, in_ann); news = {wanted(k) for k in ks if k is not ANY}
        real = {n for n in news if n}
        if len(real) > 1 or (real and None in news): report.append(f"CONFLICT {path}:{node.end_lineno}: .{node.attr} is {ks} -> {news}")
        if real:
            edit(path, node.end_lineno, node.end_col_offset - len(node.attr.encode()), node.attr, sorted(real)[0], [k for k in ks if wanted(k)][0])
        elif ANY in ks and node.attr in oldnames: report.append(f"UNRESOLVED {path}:{node.end_lineno}: .{node.attr}   {lines[node.end_lineno-1].strip()[:110]}")
    def param_key(fn_node_full, node, kw):
        fd = funcdef(node)
        if fd is None: return None
        return f"{fd.fullname}@{kw}" if kw in argnames(fd) else None
    def class_kw(info, kw):
        for c in info.mro:
            if "__init__" in c.names and funcdef(c.names["__init__"].node) is not None and not c.names["__init__"].plugin_generated:
                if not is_ours(c.fullname): return lookup(info, kw)
                return param_key(None, c.names["__init__"].node, kw)
            if "dataclass" in c.metadata or "dataclass_tag" in c.metadata: return lookup(info, kw)
        return lookup(info, kw)
    def callee_kw(e, kw):
        """Key of a keyword of a call of expression e."""
        if isinstance(e, N.IndexExpr): e = e.base
        if isinstance(e, N.RefExpr):
            n = e.node
            if isinstance(n, N.TypeInfo): return class_kw(n, kw)
            if isinstance(n, N.TypeAlias): 
                o = owners(n.target); return class_kw(o[0], kw) if o and o[0] is not ANY else None
            if isinstance(n, (N.FuncDef, N.Decorator, N.OverloadedFuncDef)) and is_ours(getattr(n, "fullname", "") or ""): return param_key(None, n, kw)
        if isinstance(e, N.MemberExpr):
            ks = [k for k in member_keys(e) if k is not ANY]
            for k in ks:
                owner, _, name = k.rpartition("."); info = infos.get(owner)
                if info is not None:
                    r = param_key(None, info.names[name].node, kw)
                    if r: return r
                    if isinstance(info.names[name].node, N.TypeInfo): return class_kw(info.names[name].node, kw)
        if isinstance(e, N.SuperExpr) and e.info:
            for c in e.info.mro[1:]:
                if e.name in c.names: return param_key(None, c.names[e.name].node, kw) if is_ours(c.fullname) else None
        t = types.get(e)
        if t is not None:
            t = T.get_proper_type(t)
            if isinstance(t, T.CallableType):
                if t.is_type_obj():
                    o = owners(t.ret_type)
                    return class_kw(o[0], kw) if o and o[0] is not ANY else None
                if t.definition is not None: return param_key(None, t.definition, kw)
            if isinstance(t, T.Instance) and lookup(t.type, "__call__"):
                for c in t.type.mro:
                    if "__call__" in c.names: return param_key(None, c.names["__call__"].node, kw)
            if isinstance(t, T.TypeType):
                o = owners(t.item)
                return class_kw(o[0], kw) if o and o[0] is not ANY else None
        return None
    def do_call(node):
        if not node.keywords: return
        e = get(node, "CallExpr")
        for kw in node.keywords:
            if kw.arg is None: continue
            key = None
            if e is not None:
                callee = e.callee
                name = callee.name if isinstance(callee, (N.NameExpr, N.MemberExpr)) else ""
                if name == "replace" and e.args and types.get(e.args[0]) is not None:
                    os_ = [o for o in owners(types[e.args[0]]) if o is not ANY]
                    key = lookup(os_[0], kw.arg) if os_ and is_ours(os_[0].fullname) else None
                elif name == "partial" and e.args: key = callee_kw(e.args[0], kw.arg)
                else: key = callee_kw(callee, kw.arg)
            new = wanted(key)
            if new: edit(path, kw.lineno, kw.col_offset, kw.arg, new, key)
            elif key is None and kw.arg in oldnames and e is not None:
                t = types.get(e.callee)
                if t is None or isinstance(T.get_proper_type(t), T.AnyType) or (isinstance(T.get_proper_type(t), T.CallableType) and T.get_proper_type(t).is_ellipsis_args):
                    report.append(f"UNRESOLVED {path}:{kw.lineno}: {kw.arg}=   {lines[kw.lineno-1].strip()[:110]}")
    scope = [m]
    def walk(node, ann=False):
        if isinstance(node, ast.Name): do_name(node, ann)
        elif isinstance(node, ast.Attribute): do_attr(node, ann)
        elif isinstance(node, ast.Call): do_call(node)
        elif isinstance(node, ast.Constant) and ann and isinstance(node.value, str) and node.lineno == node.end_lineno:
            for mt in re.finditer(r"[A-Za-z_]\w*", node.value):
                k = module_key(mt.group()); new = wanted(k)
                if new: edit(path, node.lineno, node.col_offset + 1 + mt.start(), mt.group(), new, k)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = pkg.split("."); up = up[: len(up) - node.level + 1]; base = ".".join(up + ([node.module] if node.module else []))
            for al in node.names:
                fm = trees.get(base)
                k = None
                if fm is not None and al.name in fm[0].names and fm[0].names[al.name].node is not None and not isinstance(fm[0].names[al.name].node, N.MypyFile):
                    k = node_key(fm[0].names[al.name].node)
                new = wanted(k)
                if new and k.rsplit(".", 1)[1] == al.name: edit(path, al.lineno, al.col_offset, al.name, new, k)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            full = ".".join([*scope, node.name]); new = wanted(full)
            for ln in range(node.lineno, node.end_lineno + 1):
                mt = re.search(r"\b(?:class|def)\s+(%s)\b" % node.name, lines[ln - 1])
                if mt: break
            if new: edit(path, ln, len(lines[ln - 1][: mt.start(1)].encode()), node.name, new, full)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            a = node.args
            for arg in a.posonlyargs + a.args + a.kwonlyargs + [x for x in (a.vararg, a.kwarg) if x]:
                # identity as mypy's fullname of the function
                k = f"{'.'.join([*scope, node.name])}@{arg.arg}"; new = wanted(k)
                if new: edit(path, arg.lineno, arg.col_offset, arg.arg, new, k)
                if arg.annotation: walk(arg.annotation, True)
            for d in node.decorator_list + a.defaults + [x for x in a.kw_defaults if x]: walk(d)
            if node.returns: walk(node.returns, True)
            scope.append(node.name)
            for b in node.body: walk(b)
            scope.pop(); return
        if isinstance(node, ast.ClassDef):
            for d in node.decorator_list + node.bases: walk(d)
            for k in node.keywords: walk(k.value)
            scope.append(node.name)
            for b in node.body: walk(b)
            scope.pop(); return
        if isinstance(node, ast.AnnAssign):
            walk(node.target); walk(node.annotation, True)
            if node.value: walk(node.value)
            return
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            for nm in node.names:
                new = wanted(module_key(nm)) if isinstance(node, ast.Global) else None
                if new:
                    mt = re.search(r"\b%s\b" % nm, lines[node.lineno - 1]); edit(path, node.lineno, mt.start(), nm, new, module_key(nm))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cast" and node.args:
            walk(node.func); walk(node.args[0], True)
            for x in node.args[1:]: walk(x)
            return
        if isinstance(node, ast.keyword): walk(node.value); return
        if isinstance(node, ast.MatchClass):
            walk(node.cls)
            for x in node.patterns + node.kwd_patterns: walk(x)
            for nm in node.kwd_attrs:
                if nm in oldnames: report.append(f"UNRESOLVED {path}:{node.lineno}: match {nm}=")
            return
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            for c in ast.walk(node.value):
                if isinstance(c, ast.Constant) and isinstance(c.value, str):
                    k = module_key(c.value); new = wanted(k)
                    if new and k.startswith("windlass"): edit(path, c.lineno, c.col_offset + 1, c.value, new, k)
        for ch in ast.iter_child_nodes(node): walk(ch, ann)
    for b in tree.body: walk(b)
total = 0
for path, es in edits.items():
    bl = [l.encode() for l in Path(path).read_text().split("\n")]
    for (ln, col), (old, new) in sorted(es.items(), reverse=True):
        got = bl[ln - 1][col: col + len(old.encode())].decode(errors="replace")
        if got != old: report.append(f"MISPLACED {path}:{ln}:{col} {old!r} {got!r}"); continue
        bl[ln - 1] = bl[ln - 1][:col] + new.encode() + bl[ln - 1][col + len(old.encode()):]; total += 1
    if doit: Path(path).write_text("\n".join(l.decode() for l in bl))
for g, new in want.items():
    n = sum(c for k, c in counts.items() if find(k) == g)
    if n <= 1: report.append(f"FEW {origin[g]} -> {new}: {n}")
print("\n".join(report)); print(total, "edits in", len(edits), "files;", len(failed), "failed", f"{time.time()-t0:.0f}s")
