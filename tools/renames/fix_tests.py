"""Fix names in strings, keywords and Any-typed code from a pytest log (long tracebacks): fixtest.py LOG."""
import re,collections,sys
from pathlib import Path
moves={}; 
for f in ('zero','eng','par','lau','cmp','after'):
    for l in open(Path(__file__).parent / f'{f}.moves'):
        l=l.split('#')[0].split()
        if len(l)==2: moves[l[0]]=l[1]
moves={a:moves.get(b,b) for a,b in moves.items()}
mod=collections.defaultdict(dict); cls=collections.defaultdict(dict); newcls={}; anyattr=collections.defaultdict(set); params=collections.defaultdict(dict)
for l in open(Path(__file__).parent / 'all.symbols'):
    l=l.split('#')[0].strip()
    if not l: continue
    t,new=l.split(); path,d=t.split('::'); m=moves.get(path,path)
    if '@' in d:
        fn,p=d.split('@'); params[fn.split('.')[-1]][p]=new; params[fn.split('.')[0]][p]=new
        continue
    parts=d.split('.')
    if len(parts)==1: mod[m][parts[0]]=new; newcls[parts[0]]=new; anyattr[parts[0]].add(new)
    else: cls[parts[0]][parts[1]]=new; anyattr[parts[1]].add(new)
for c in list(cls):
    if c in newcls: cls[newcls[c]].update(cls[c])
for c in list(params):
    if c in newcls: params[newcls[c]].update(params[c])
log=Path(sys.argv[1]).read_text()
blocks=re.split(r'\n_{5,}[^\n]*_{5,}\n',log)
n=0; todo=collections.Counter(); done=set()
def edit(path,ln,old,new,kinds):
    global n
    p=Path(path)
    if not p.exists() or (path,ln,old) in done: return False
    lines=p.read_text().split('\n')
    for k in [ln-1]+[x for d in range(1,7) for x in (ln-1-d,ln-1+d)]:
        if not 0<=k<len(lines): continue
        s=lines[k]
        for pat,rep in kinds:
            s2=re.sub(pat,rep,s)
            if s2!=s:
                lines[k]=s2; p.write_text('\n'.join(lines)); done.add((path,ln,old)); n+=1; return True
    return False
for b in blocks:
    locs=re.findall(r'\n((?:tests|windlass|bench|tools)/\S+?\.py):(\d+): ',b)
    locs=[(f,int(l)) for f,l in locs]
    mfin=re.findall(r'\n([\w/.-]+\.py):(\d+): (\w+)',b)
    for e in re.findall(r'\nE +(\S.*)',b):
        m=re.search(r"module '?(?:at )?([\w.]+)'?.* has no attribute '(\w+)'",e) or re.search(r"'module' object at ([\w.]+) has no attribute '(\w+)'",e)
        if m:
            mp=m.group(1).replace('.','/')+'.py'; old=m.group(2); new=mod.get(mp,{}).get(old) or (next(iter(anyattr[old])) if len(anyattr[old])==1 else None)
            if new:
                hit=False
                for f,l in reversed(locs):
                    if edit(f,l,old,new,[(r'"%s"'%old,'"%s"'%new),(r"'%s'"%old,"'%s'"%new),(r'\.%s\b'%old,'.'+new)]): hit=True; break
                if not hit:  # a fixture or a dotted string
                    for f,l in reversed(locs[:1]):
                        s=Path(f).read_text(); s2=re.sub(r'(["\'.])%s(["\'])'%old,r'\g<1>%s\2'%new,s)
                        if s2!=s: Path(f).write_text(s2); n+=1; hit=True
                if not hit: todo[e[:150]]+=1
            else: todo[e[:150]]+=1
            continue
        m=re.search(r"'(\w+)' object has no attribute '(\w+)'",e) or re.search(r"<class '[\w.]*?(\w+)'> has no attribute '(\w+)'",e)
        if m:
            c,old=m.groups(); new=cls.get(c,{}).get(old) or (next(iter(anyattr[old])) if len(anyattr[old])==1 else None)
            if new:
                for f,l in reversed(locs):
                    if edit(f,l,old,new,[(r'\.%s\b'%old,'.'+new),(r'"%s"'%old,'"%s"'%new)]): break
                else: todo[e[:150]]+=1
            else: todo[e[:150]]+=1
            continue
        m=re.search(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'",e)
        if m:
            c,old=m.groups(); new=params.get(c,{}).get(old) or cls.get(c,{}).get(old)
            if new:
                for f,l in reversed(locs):
                    if edit(f,l,old,new,[(r'\b%s=(?!=)'%old,new+'='),(r'"%s":'%old,'"%s":'%new),(r'"%s"'%old,'"%s"'%new)]): break
                else: todo[e[:150]]+=1
            else: todo[e[:150]]+=1
            continue
print(n,'edits'); 
for k,v in todo.most_common(60): print(v,k)
