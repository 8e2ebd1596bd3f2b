import ast,json,re,subprocess,collections
from pathlib import Path
jobs=collections.defaultdict(set)
for l in open(Path(__file__).parent / 'all.symbols'):
    l=l.split('#')[0].strip()
    if not l: continue
    t,new=l.split(); old=re.split(r'[.@]|::',t)[-1]; jobs[old].add(new)
out=json.loads(subprocess.run(['.venv/bin/ruff','check','--select','F821','--output-format','json','.'],capture_output=True,text=True).stdout)
left=[]
for e in sorted(out,key=lambda e:(e['filename'],-e['location']['row'],-e['location']['column'])):
    p=Path(e['filename']); row=e['location']['row']; name=re.search('`(.+)`',e['message']).group(1)
    src=p.read_text(); lines=src.split('\n'); tree=ast.parse(src)
    best=set()
    for fn in ast.walk(tree):
        if isinstance(fn,(ast.FunctionDef,ast.AsyncFunctionDef,ast.Lambda)) and fn.lineno<=row<=fn.end_lineno:
            a=fn.args
            params={x.arg for x in a.posonlyargs+a.args+a.kwonlyargs+[y for y in (a.vararg,a.kwarg) if y]}
            best|=params&jobs[name]
    mod={n for n in jobs[name] if re.search(r'^(class|def|async def)? ?%s\b'%re.escape(n),src,re.M) or re.search(r'import .*\b%s\b'%re.escape(n),src)}
    cands=best or mod
    if len(cands)==1:
        new=cands.pop(); line=lines[row-1]; c=e['location']['column']-1
        if line[c:c+len(name)]==name: lines[row-1]=line[:c]+new+line[c+len(name):]
        else:
            n2=re.sub(r'(?<![\w.])%s(?=\W)'%re.escape(name),new,line) if '{' in line else line
            if n2==line: left.append((str(p),row,name,'pos')); continue
            lines[row-1]=n2
        p.write_text('\n'.join(lines))
    else: left.append((str(p)[12:],row,name,sorted(cands)))
for x in left: print(*x)
