"""move.py ROOT MOVES...: move modules, and rewrite dotted and path references."""
import ast, os, re, subprocess, sys
from pathlib import Path
root = Path(sys.argv[1]); os.chdir(root)
moves = {}
for f in sys.argv[2:]:
    for l in open(f):
        l = l.split("#")[0].strip()
        if not l: continue
        a, b = l.split()
        if not Path(a).exists(): print("MISSING", a); continue
        if a in moves: print("TWICE", a); continue
        moves[a] = b
targets = {}
for a, b in moves.items():
    if b in targets: print("CLASH", a, targets[b], b)
    targets[b] = a
    if Path(b).exists() and b not in moves: print("EXISTS", a, b)
git = lambda *x: subprocess.run(["git", *x], check=True, capture_output=True, text=True).stdout
dot = lambda p: p[:-3].replace("/", ".").removesuffix(".__init__")
dotted = {dot(a): dot(b) for a, b in moves.items() if a.endswith(".py")}
paths = dict(moves)
files = [f for f in git("ls-files").split("\n") if f and Path(f).is_file() and Path(f).suffix in (".py", ".md", ".toml", ".yml", ".cfg", ".txt", "", ".json", ".hpp", ".cpp", ".ini") and f not in ("LICENSE", "requirements.lock")]
# 1. imports of modules as names: `from windlass.zero import registry`
for f in files:
    if not f.endswith(".py"): continue
    src = Path(f).read_text(); tree = ast.parse(src); lines = [l.encode() for l in src.split("\n")]; es = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            hit = [al for al in node.names if f"{node.module}.{al.name}" in dotted and (node.module, al.name) not in {("windlass.kernels","keyed_sum"),("windlass.checkpoint","load"),("windlass.checkpoint","save")}]
            if not hit: continue
            stmts = []
            rest = [al for al in node.names if al not in hit]
            if rest: stmts.append(f"from {node.module} import " + ", ".join(al.name + (f" as {al.asname}" if al.asname else "") for al in rest))
            for al in hit:
                np, _, nn = dotted[f"{node.module}.{al.name}"].rpartition(".")
                stmts.append(f"from {np} import {nn}" + (f" as {al.asname}" if al.asname else ""))
                if not al.asname and nn != al.name:
                    for x in ast.walk(tree):
                        if isinstance(x, ast.Name) and x.id == al.name: es.append((x.lineno, x.col_offset, x.lineno, x.end_col_offset, nn))
            es.append((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, ("\n" + " " * node.col_offset).join(stmts)))
    for ln, c, el, ec, new in sorted(set(es), reverse=True):
        first, last = lines[ln - 1][:c], lines[el - 1][ec:]
        lines[ln - 1 : el] = [first + new.encode() + last]
    if es: Path(f).write_text("\n".join(l.decode() for l in lines))
# 2. dotted and paths
keys = sorted(dotted, key=len, reverse=True)
rx = re.compile(r"(?<![\w.])(" + "|".join(re.escape(k) for k in keys) + r")(?![\w])") if keys else None
pk = sorted(paths, key=len, reverse=True)
px = re.compile(r"(?<![\w/])((?:" + "|".join(re.escape(k) for k in pk) + r"))(?![\w])")
# short forms in docs and comments: `zero/core/collective_scheduler`, tests/dist/test_x.py without prefix windlass/
short = {a.removeprefix("windlass/").removesuffix(".py"): b.removeprefix("windlass/").removesuffix(".py") for a, b in paths.items() if a.startswith("windlass/") and a.count("/") >= 2 and not a.endswith("__init__.py")}
sx = re.compile(r"(?<![\w/.])(" + "|".join(re.escape(k) for k in sorted(short, key=len, reverse=True)) + r")(?=(\.py)?[`'\"\s,.;:)])(?!/)")
for f in files:
    try: src = Path(f).read_text()
    except UnicodeDecodeError: continue
    new = rx.sub(lambda m: dotted[m.group(1)], src) if rx else src
    new = px.sub(lambda m: paths[m.group(1)], new)
    new = sx.sub(lambda m: short[m.group(1)], new)
    if new != src: Path(f).write_text(new)
# 3. files, in two steps
for a in moves: git("mv", a, a + ".moving")
for a, b in moves.items():
    Path(b).parent.mkdir(parents=True, exist_ok=True); git("mv", a + ".moving", b)
for b in moves.values():
    d = Path(b).parent
    while d != Path("windlass") and d.parts and d.parts[0] == "windlass":
        if not (d / "__init__.py").exists(): (d / "__init__.py").write_text('""""""\n'); print("NEW PACKAGE", d)
        d = d.parent
print(len(moves), "moved")
