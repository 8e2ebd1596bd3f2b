import re,collections,subprocess,sys
from pathlib import Path
jobs=collections.defaultdict(lambda: collections.defaultdict(set)); cls={}
allnew=collections.defaultdict(set)
for l in open(Path(__file__).parent / 'all.symbols'):
    l=l.split('#')[0].strip()
    if not l: continue
    t,new=l.split(); dotted=t.split('::')[1]
    if '@' in dotted: continue
    parts=dotted.split('.')
    if len(parts)==1: cls[parts[0]]=new
    elif len(parts)==2: jobs[parts[0]][parts[1]].add(new); allnew[parts[1]].add(new)
by=collections.defaultdict(lambda: collections.defaultdict(set))
for c,d in jobs.items():
    for n,s in d.items():
        by[c][n]|=s; by[cls.get(c,c)][n]|=s
n=0; left=[]
for l in open(sys.argv[1]):
    m=re.match(r'(\S+?):(\d+): error: "([^"]+)" has no attribute "(\w+)"',l)
    if not m: continue
    f,ln,c,a=m.groups(); ln=int(ln); c=re.sub(r'^type\[|\]$|\?$','',c).split('[')[0]
    cand=by[c][a] if a in by[c] else set()
    if not cand and len(allnew[a])==1: cand=allnew[a]
    p=Path(f); lines=p.read_text().split('\n')
    if len(cand)==1:
        new=next(iter(cand)); s2=re.sub(r'\.%s\b(?!=)'%a,'.'+new,lines[ln-1])
        if s2==lines[ln-1]:  # multi-line f-string: search following lines
            for k in range(ln,min(ln+8,len(lines))):
                s3=re.sub(r'\.%s\b'%a,'.'+new,lines[k])
                if s3!=lines[k] and '{' in lines[k]: lines[k]=s3; n+=1; break
            else: left.append(l.strip()); continue
        else: lines[ln-1]=s2; n+=1
        p.write_text('\n'.join(lines))
    else: left.append(l.strip()+f'   {sorted(allnew[a])}')
print(n,'fixed'); print('\n'.join(left))
